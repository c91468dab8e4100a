"""A trace's summary and capacities on it are what loops count, on any placement."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve import trace as trace_module
from capmoe_serve.capacities import KEEPERS, CapacityCounter, Granularity
from capmoe_serve.placements import SlotPlan, contiguous
from capmoe_serve.summary import ALL, summarise
from capmoe_serve.trace import Trace
from serving.capacity_reference import StepCounts, count_step

# The summary of a trace is what loops over its tokens count.


GAMMAS = (0.0, 0.4, 1.0, 1.1, 2.0, 8.0)


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


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from((1, 40, 2**22)))
def test_it_is_what_loops_count(trace: Trace, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "_AT_ONCE", at_once)  # parts of any size give the same
        summary = summarise(trace, GAMMAS)
    asked = trace.expert_TLK[:, 0].size
    mean = asked / (trace.ranks or 1)
    home = contiguous(1, trace.n_experts, trace.ranks or 1)
    for layer, name in enumerate(trace.layers):
        assert summary.layers.loc[name, "pairs"] == asked == summary.load_LE[layer].sum()
        for gamma, at in summary.capacities.loc[name].iterrows():
            steps = [
                count_step(
                    trace.expert_TLK[trace.step_T == step, layer].tolist(),
                    trace.score_TLK[trace.step_T == step, layer].tolist(),
                    gamma=float(gamma),  # type: ignore[arg-type]
                    n_experts=trace.n_experts,
                    placed=home.expert_LRN[0].tolist(),
                )
                for step in np.unique(trace.step_T)
            ]
            dropped, slots, before, after = (
                sum(getattr(step, name) for step in steps)
                for name in ("dropped", "slots", "fullest_before", "fullest_after")
            )
            mass = float(trace.score_TLK[:, layer].sum()) or 1.0
            lost = {
                f"lost_{keeper}": sum(step.dropped_score[keeper] for step in steps) / mass
                for keeper in KEEPERS
            }
            expected = {
                "dropped": dropped / asked,
                "padding": 1 - (asked - dropped) / slots if slots else math.nan,
                "straggler": after / mean,
                **lost,
            }
            assert at.to_dict() == pytest.approx(expected, nan_ok=True)
            assert summary.layers.loc[name, "straggler"] == pytest.approx(before / mean)


@settings(max_examples=30, deadline=None)
@given(traces())
def test_counts_alone_give_the_same_without_scores(trace: Trace) -> None:
    counts = Trace(
        n_experts=trace.n_experts, load_SLE=trace.loads(), top_k=trace.top_k, ranks=trace.ranks
    )
    assert (counts.n_tokens, counts.n_steps) == (trace.n_tokens, trace.n_steps)
    of_tokens, counted = summarise(trace, GAMMAS), summarise(counts, GAMMAS)
    pd.testing.assert_frame_equal(of_tokens.layers, counted.layers)
    assert list(counted.capacities) == ["dropped", "padding", "straggler"]
    pd.testing.assert_frame_equal(
        of_tokens.capacities[list(counted.capacities)], counted.capacities
    )
    assert (of_tokens.load_LE == counted.load_LE).all()


@settings(max_examples=30, deadline=None)
@given(traces())
def test_more_capacity_drops_less_and_score_loses_least(trace: Trace) -> None:
    summary = summarise(trace, (*GAMMAS, math.inf))
    total = summary.capacities.loc[ALL]
    rates = total["dropped"].tolist()
    assert (rates[0], rates[-1]) == (1, 0)
    assert rates == sorted(rates, reverse=True)
    lost = total[[f"lost_{keeper}" for keeper in KEEPERS]]
    assert (total["lost_score"] <= lost.min(axis=1) + 1e-9).all()
    assert (total["straggler"] <= summary.layers.loc[ALL, "straggler"] + 1e-9).all()


def test_peaks_are_those_of_a_step_and_not_of_the_sum() -> None:
    # Two steps, each with all its tokens on one expert: in the sum nobody is busier than another.
    ids = np.array([0, 0, 1, 1], dtype=np.uint8)[:, None, None]
    trace = Trace(2, ids, step_T=np.array([0, 0, 1, 1]), ranks=2)
    summary = summarise(trace)
    assert summary.load_LE.tolist() == [[2, 2]]
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


@settings(max_examples=60, deadline=None)
@given(st.data(), traces(), st.booleans())
def test_capacities_are_what_loops_count(data: st.DataObject, trace: Trace, wide: bool) -> None:
    placement = data.draw(placements(trace))
    either: tuple[Granularity, ...] = ("device",) if placement.redundant else ("expert", "device")
    of = data.draw(st.sampled_from(either))
    factors = st.sampled_from((0.4, 1.0, 1.1, 3.0, 20.0 if wide else 0.7))
    gammas = [data.draw(factors) for _ in range(2)]
    sums = CapacityCounter(trace, gammas, placement, of).counted()
    counts = Trace(trace.n_experts, load_SLE=trace.loads(), top_k=trace.top_k)
    without = CapacityCounter(counts, gammas, placement, of).counted()
    for gamma, of_all, of_counts in zip(gammas, sums, without, strict=True):
        by_layer: list[list[StepCounts]] = [
            [
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
            for layer in range(trace.n_layers)
        ]
        asked_L = np.full(trace.n_layers, trace.expert_TLK[:, 0].size)  # type: ignore[index]
        dropped_L = [sum(count.dropped for count in counts) for counts in by_layer]
        assert (of_all.asked_L - of_all.kept_L).tolist() == dropped_L
        assert of_all.slots_L.tolist() == [
            sum(count.slots for count in counts) for counts in by_layer
        ]
        fullest_L = [sum(count.fullest_after for count in counts) for counts in by_layer]
        assert of_all.fullest_L.tolist() == fullest_L
        assert (of_all.asked_L == asked_L).all()
        assert of_all.straggler == pytest.approx(sum(fullest_L) * placement.ranks / asked_L.sum())
        every = [count for counts in by_layer for count in counts]
        mass = float(trace.score_TLK.sum()) or 1.0  # type: ignore[union-attr]
        for keeper in ("score", "order", "random"):
            lost = sum(count.dropped_score[keeper] for count in every) / mass
            assert of_all.lost[keeper] == pytest.approx(lost, abs=1e-6)
        # Counts alone say the same, but for the scores.
        assert (of_counts.straggler, of_counts.drop_rate) == (of_all.straggler, of_all.drop_rate)
        assert of_counts.lost == {}
