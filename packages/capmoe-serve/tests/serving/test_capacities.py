"""Capacities on a trace are what loops count, on any placement."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.capacities import CapacityCounter, CapacitySums, Granularity
from capmoe_serve.placements import SlotPlan, contiguous, rank_loads, slots_in_turn
from capmoe_serve.trace import Trace
from serving.capacity_reference import StepCounts, count_step
from serving.test_summary import traces


def by_steps(trace: Trace, layer: int) -> Iterator[tuple[list[list[int]], list[list[float]]]]:
    assert trace.expert_TLK is not None
    assert trace.score_TLK is not None
    assert trace.step_T is not None
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


@settings(max_examples=40, deadline=None)
@given(st.data(), traces())
def test_replicas_take_pairs_in_turn(data: st.DataObject, trace: Trace) -> None:
    """Slots of the pairs make the loads of the ranks, which a split knows without the pairs."""
    placement = data.draw(placements(trace))
    loads = rank_loads(trace.loads(), placement)
    for layer in range(trace.n_layers):
        for step, (experts, _) in enumerate(by_steps(trace, layer)):
            chosen = np.array(experts).ravel()
            slots = slots_in_turn(chosen, np.zeros(len(chosen), dtype=np.int64), placement, layer)
            assert (placement.expert_LP[layer][slots] == chosen).all()
            ranks = np.bincount(slots // placement.expert_LRN.shape[2], minlength=placement.ranks)
            assert ranks.tolist() == loads[step, layer].tolist()


def test_a_capacity_on_a_placement_by_hand() -> None:
    # Four experts on two ranks; 0 and 1 are hot, and both at home on the first rank.
    trace = Trace(4, load_SLE=np.array([[[6, 4, 1, 1]]]), top_k=1)
    home, parted = contiguous(1, 4, 2), SlotPlan(np.array([[[0, 2], [1, 3]]]), 4)
    both = SlotPlan(np.array([[[0, 1, 2], [1, 3, 0]]]), 4)
    # C = 6 pairs of a rank: contiguous 10 come, parted 7 and 5, with copies 3+2+1 and 2+1+3.
    of_devices = [counted(trace, each, "device") for each in (home, parted, both)]
    assert [int(sums.kept_L[0]) for sums in of_devices] == [8, 11, 12]
    # C = 3 of an expert: the same 4 on both placements, of other ranks.
    of_experts = [counted(trace, each, "expert") for each in (home, parted)]
    assert [int(sums.kept_L[0]) for sums in of_experts] == [8, 8]
    assert [int(sums.fullest_L[0]) for sums in of_experts] == [6, 4]


def test_ranks_that_do_not_divide_the_experts_by_hand() -> None:
    """Three experts on two ranks: the first has a copy, behind the last."""
    home = contiguous(1, 3, 2, 2)
    assert home.expert_LRN.tolist() == [[[0, 1], [2, 0]]]
    trace = Trace(3, load_SLE=np.array([[[6, 3, 3]]]), top_k=1)
    sums = counted(trace, home, "device")  # C = 12/2: 3 of each expert come to both ranks
    assert (int(sums.kept_L[0]), int(sums.fullest_L[0])) == (12, 6)
    assert int(counted(trace, home, "device", 0.5).kept_L[0]) == 6


def counted(trace: Trace, placement: SlotPlan, of: Granularity, gamma: float = 1.0) -> CapacitySums:
    """Return what a capacity does to the one layer of a trace."""
    (sums,) = CapacityCounter(trace, [gamma], placement, of).counted()
    return sums
