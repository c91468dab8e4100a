"""A trace's summary and capacities on it are what loops count, on any placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.placements import SlotPlan, contiguous
from capmoe_serve.summary import Granularity, count, shares, summarise
from capmoe_serve.trace import Trace

GAMMAS = (0.0, 0.4, 1.0, 1.1, 2.0, 20.0)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a trace with scores and steps, some of them equal, and with unequal loads."""
    seed = draw(st.integers(0, 2**32 - 1))
    ranks = draw(st.sampled_from((1, 2, 4)))
    n_experts = ranks * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(n_experts, 3)))
    n_tokens, n_layers = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    generator = np.random.default_rng(seed)
    liking = generator.random((n_tokens, n_layers, n_experts)) + 2 * generator.random(n_experts)
    ids = np.argsort(-liking, axis=2)[:, :, :top_k].astype(np.uint8)
    return Trace(
        n_experts=n_experts,
        expert_TLK=ids,
        score_TLK=generator.integers(0, 4, ids.shape).astype(np.float32) / 4,
        step_T=np.sort(generator.integers(0, draw(st.integers(1, 5)), n_tokens)),
        ranks=ranks,
    )


def test_peaks_are_those_of_a_step_and_not_of_the_sum() -> None:
    # In the first layer each step has all its tokens on one expert, in the second the short one.
    ids = np.array([[0, 0], [0, 1], [0, 0], [0, 1], [1, 1], [1, 1]], dtype=np.uint8)[:, :, None]
    trace = Trace(2, ids, step_T=np.array([0, 0, 0, 0, 1, 1]), ranks=2)
    layers, capacities = summarise(trace, (8.0,))
    assert layers["expert_mean"].tolist() == [2.0, 1.5, 1.75]
    assert set(layers["expert_max"]) == {2.0}
    stragglers = pytest.approx([2.0, 4 / 3, 5 / 3])
    assert layers["straggler"].tolist() == stragglers
    assert capacities["straggler"].tolist() == stragglers
    assert summarise(Trace(2, ids, ranks=2))[0].loc["0", "straggler"] == pytest.approx(4 / 3)


def test_ranks_that_do_not_divide_the_experts_have_copies() -> None:
    """As 60 experts and 4 copies on 8 ranks; here expert 0 has a copy behind expert 2."""
    trace = Trace(3, load_SLE=np.array([[[6, 3, 3]]]), top_k=1)
    layers, uneven = summarise(trace, (0.5,), ranks=2)
    _, alone = summarise(trace, (0.5,))
    assert layers.loc["0", "straggler"] == 1.0  # 3 of expert 0 on each rank
    assert list(uneven) == list(alone) == ["dropped", "padding"]
    assert uneven.equals(alone)


def test_a_summary_of_nothing_is_refused_by_name() -> None:
    """It was an IndexError, or a table of nonsense."""
    trace = Trace(2, np.zeros((2, 1, 1), np.uint8))
    for gammas, ranks, field in (((), 1, "gammas"), ((-1.0,), 1, "gammas"), ((1.0,), 0, "ranks")):
        with pytest.raises(UsageError, match=f"^{field}="):
            summarise(trace, gammas, ranks=ranks)


# Capacities on a trace are what loops count, on any placement.


def count_step(
    experts: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    *,
    gamma: float,
    n_experts: int,
    placed: Sequence[Sequence[int]],
    of_devices: bool = False,
) -> dict[str, float]:
    """Count by loops what one capacity does to one layer of a step, token by token.

    ``experts[t]`` are the experts of token t, ``scores[t]`` their gate scores; ``placed`` has the
    experts in the slots of every rank. A token's pairs come in the order of their experts. An
    expert's first pair goes to its first slot, the next to its next, and in turn again. A capacity
    is of every slot, of which each expert then has one, or (``of_devices``) of every rank, whose
    slots share it.
    """
    n_experts_bound = Fraction(n_experts, len(placed)) if of_devices else 1
    exact = Fraction(repr(gamma)) * n_experts_bound * len(experts) * len(experts[0]) / n_experts
    limit = min(math.ceil(exact), (len(placed[0]) if of_devices else 1) * len(experts))
    slots = [(rank, slot) for rank, held in enumerate(placed) for slot in range(len(held))]
    pairs: dict[tuple[int, int], list[tuple[int, float]]] = {slot: [] for slot in slots}
    turns, number = [0] * n_experts, 0
    for chosen, gates in zip(experts, scores, strict=True):
        for expert, score in sorted(zip(chosen, gates, strict=True)):
            places = [(rank, slot) for rank, slot in slots if placed[rank][slot] == expert]
            pairs[places[turns[expert] % len(places)]].append((number, score))
            turns[expert] += 1
            number += 1
    buckets = [
        [(*pair, slot) for slot in slots if slot[0] == rank for pair in pairs[slot]]
        for rank in range(len(placed))
    ]
    if not of_devices:
        buckets = [[(*pair, slot) for pair in pairs[slot]] for slot in slots]
    after = [0] * len(placed)
    dropped, lost = 0, {"score": 0.0, "order": 0.0, "random": 0.0}
    for bucket in buckets:
        kept = min(len(bucket), limit)
        dropped += len(bucket) - kept
        in_order = sorted(bucket)
        by_score = sorted(in_order, key=lambda pair: -pair[1])  # of equal scores the first
        for keeper, ordered in (("order", in_order), ("score", by_score)):
            lost[keeper] += sum(score for _, score, _ in ordered[kept:])
        if bucket:
            after[bucket[0][2][0]] += kept
            mass = sum(score for _, score, _ in bucket)
            lost["random"] += mass * (len(bucket) - kept) / len(bucket)
    asked = len(experts) * len(experts[0])
    counts = {"asked": asked, "kept": asked - dropped, "slots": limit * len(buckets)}
    mass = sum(map(sum, scores))
    return (
        counts | {"fullest": max(after), "mass": mass} | {f"lost_{k}": v for k, v in lost.items()}
    )


def by_steps(trace: Trace, layer: int) -> Iterator[tuple[list[list[int]], list[list[float]]]]:
    for step in np.unique(trace.step_T):
        there = trace.step_T == step
        yield trace.expert_TLK[there, layer].tolist(), trace.score_TLK[there, layer].tolist()


@st.composite
def placements(draw: st.DrawFn, trace: Trace) -> SlotPlan:
    """Draw contiguous placement, or the experts in any slots, some of them in several."""
    ranks = draw(st.integers(1, 4))
    slots = -(-trace.n_experts // ranks) + draw(st.integers(0, 2))
    home = contiguous(trace.n_layers, trace.n_experts, ranks, slots)
    if draw(st.booleans()):
        return home
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    expert_LP = generator.permuted(home.expert_LP, axis=1)
    return SlotPlan(expert_LP.reshape(home.expert_LRN.shape), trace.n_experts)


@settings(max_examples=30, deadline=None)
@given(st.data(), traces(), st.booleans())
def test_capacities_are_what_loops_count(data: st.DataObject, trace: Trace, wide: bool) -> None:
    placement = data.draw(placements(trace))
    either: tuple[Granularity, ...] = ("device",) if placement.redundant else ("expert", "device")
    of = data.draw(st.sampled_from(either))
    factors = st.sampled_from((0.4, 1.0, 1.1, 3.0, 20.0 if wide else 0.7))
    gammas = sorted({data.draw(factors) for _ in range(2)})
    counts = Trace(trace.n_experts, load_SLE=trace.loads(), top_k=trace.top_k)
    sums, without = (count(each, gammas, placement, of) for each in (trace, counts))
    for (layer, gamma), row in sums.iterrows():  # type: ignore[misc]
        steps = [
            count_step(
                experts,
                scores,
                gamma=gamma,
                n_experts=trace.n_experts,
                placed=placement.expert_LRN[layer].tolist(),
                of_devices=of == "device",
            )
            for experts, scores in by_steps(trace, layer)
        ]
        expected = {name: sum(step[name] for step in steps) for name in steps[0]}
        assert row.to_dict() == pytest.approx(expected, abs=1e-5)
        counted = without.loc[layer, gamma].to_dict()  # counts alone say the same
        assert counted == {name: expected[name] for name in ("asked", "kept", "slots", "fullest")}
    total = shares(sums.groupby("gamma").sum(), placement.ranks)
    asked = trace.loads().sum()
    fullest = sums.groupby("gamma")["fullest"].sum()
    assert total["straggler"].tolist() == pytest.approx(fullest * placement.ranks / asked)
