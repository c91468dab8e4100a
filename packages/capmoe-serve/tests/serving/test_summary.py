"""A trace's summary and capacities on it are what loops count, on any placement."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.placements import SlotPlan, contiguous
from capmoe_serve.summary import ALL, KEEPERS, Granularity, count, shares, summarise
from capmoe_serve.trace import Trace
from serving.capacity_reference import count_step

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


@settings(max_examples=30, deadline=None)
@given(traces())
def test_layers_and_all_of_them_are_those_of_the_counts(trace: Trace) -> None:
    summary = summarise(trace, GAMMAS)
    home = contiguous(trace.n_layers, trace.n_experts, trace.ranks or 1)
    sums = count(trace, GAMMAS, home, "expert")
    for layer, name in enumerate(trace.layers):
        expected = shares(sums.loc[layer], home.ranks)
        pd.testing.assert_frame_equal(summary.capacities.loc[name], expected)
        assert summary.layers.loc[name, "pairs"] == sums.loc[layer, "asked"].iloc[0]
    total = summary.capacities.loc[ALL]
    pd.testing.assert_frame_equal(total, shares(sums.groupby("gamma").sum(), home.ranks))
    assert total["dropped"].iloc[0] == 1  # γ=0
    assert total["dropped"].is_monotonic_decreasing
    without_drops = summary.capacities["straggler"].xs(GAMMAS[-1], level="gamma")
    assert summary.layers["straggler"].tolist() == pytest.approx(without_drops.tolist())


def test_peaks_are_those_of_a_step_and_not_of_the_sum() -> None:
    # Two steps, each with all its tokens on one expert: in the sum nobody is busier than another.
    ids = np.array([0, 0, 1, 1], dtype=np.uint8)[:, None, None]
    trace = Trace(2, ids, step_T=np.array([0, 0, 1, 1]), ranks=2)
    summary = summarise(trace)
    assert trace.loads().sum(axis=0).tolist() == [[2, 2]]
    assert set(summary.layers.loc["0"].drop("pairs")) == {2.0}
    assert summarise(Trace(2, ids, ranks=2)).layers.loc["0", "straggler"] == 1.0


def test_ranks_that_do_not_divide_the_experts_have_copies() -> None:
    """As 60 experts and 4 copies on 8 ranks; here expert 0 has a copy behind expert 2."""
    trace = Trace(3, load_SLE=np.array([[[6, 3, 3]]]), top_k=1)
    uneven, alone = summarise(trace, (0.5,), ranks=2), summarise(trace, (0.5,))
    assert uneven.layers.loc["0", "straggler"] == 1.0  # 3 of expert 0 on each rank
    assert list(uneven.capacities) == list(alone.capacities) == ["dropped", "padding"]
    assert uneven.capacities.equals(alone.capacities)


# Capacities on a trace are what loops count, on any placement.


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
        asked = trace.expert_TLK[:, 0].size  # type: ignore[index]
        expected = {
            "asked": asked,
            "kept": asked - sum(step.dropped for step in steps),
            "slots": sum(step.slots for step in steps),
            "fullest": sum(step.fullest for step in steps),
        }
        assert without.loc[layer, gamma].to_dict() == expected  # counts alone say the same
        expected["mass"] = float(trace.score_TLK[:, layer].sum())  # type: ignore[index]
        for keeper in KEEPERS:
            expected[f"lost_{keeper}"] = sum(step.dropped_score[keeper] for step in steps)
        assert row.to_dict() == pytest.approx(expected, abs=1e-5)
    total = shares(sums.groupby("gamma").sum(), placement.ranks)
    asked = trace.loads().sum()
    fullest = sums.groupby("gamma")["fullest"].sum()
    assert total["straggler"].tolist() == pytest.approx(fullest * placement.ranks / asked)
