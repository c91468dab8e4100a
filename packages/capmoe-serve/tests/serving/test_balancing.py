from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.balancing import compare, judge
from capmoe_serve.placements import Counts, SlotPlan, contiguous, plan_eplb
from serving import balancing_reference as reference

# The example of https://github.com/deepseek-ai/EPLB (README.md at commit d52c72d).
PUBLISHED_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@st.composite
def problems(draw: Any) -> tuple[Counts, int, int]:
    """Loads [S, L, E] with a few hot experts, ranks R and slots N of a rank."""
    ranks, local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    slots = local + draw(st.integers(0, 2))
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.just(ranks * local)))
    number = st.one_of(st.integers(0, 5), st.integers(0, 60))
    size = math.prod(shape)
    numbers = draw(st.lists(number, min_size=size, max_size=size))
    return np.array(numbers, dtype=np.int64).reshape(shape), ranks, slots


def test_eplb_gives_the_published_placement() -> None:
    placement = plan_eplb(PUBLISHED_LOADS, ranks=8, slots=2, groups=4, nodes=2)
    assert placement.expert_LP.tolist() == PUBLISHED_MAP


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_eplb_follows_its_definition_and_loses_no_expert(
    problem: tuple[Counts, int, int], groups: int, nodes: int
) -> None:
    load_SLE, ranks, slots = problem
    load_LE = load_SLE[0]
    n_experts = load_LE.shape[1]
    groups, nodes = math.gcd(groups, n_experts), math.gcd(nodes, ranks)
    placement = plan_eplb(load_LE, ranks, slots, groups, nodes)
    expected = [reference.eplb(list(row), ranks, slots, groups, nodes) for row in load_LE]
    assert placement.expert_LRN.tolist() == expected
    if groups % nodes == 0 and nodes > 1:  # a group's replicas stay on one node
        group_LRN = placement.expert_LRN // (n_experts // groups)
        by_node = group_LRN.reshape(len(load_LE), nodes, -1)
        for layer, group in itertools.product(range(len(load_LE)), range(groups)):
            assert (by_node[layer] == group).any(axis=1).sum() == 1


@settings(max_examples=25, deadline=None)
@given(problems())
def test_every_pair_is_computed_once_by_replicas_in_turn(
    problem: tuple[Counts, int, int],
) -> None:
    load_SLE, ranks, slots = problem
    placement = plan_eplb(load_SLE[-1], ranks, slots)
    for layer, slots_RN in enumerate(placement.expert_LRN.tolist()):
        load_SE = load_SLE[:, layer]
        expected = [reference.round_robin(load_E, slots_RN) for load_E in load_SE.tolist()]
        pairs_SRN = placement.split(load_SE, layer).reshape(len(load_SE), ranks, slots)
        assert pairs_SRN.tolist() == expected
        expert_I = np.concatenate([np.repeat(np.arange(len(row)), row) for row in load_SE])
        step_I = np.repeat(np.arange(len(load_SE)), load_SE.sum(axis=1))
        slot_I = placement.slot_of(expert_I, step_I, layer)
        counted_SP = np.zeros((len(load_SE), ranks * slots), dtype=int)
        np.add.at(counted_SP, (step_I, slot_I), 1)
        assert (placement.expert_LP[layer][slot_I] == expert_I).all()
        assert (counted_SP == placement.split(load_SE, layer)).all()


def test_outcomes_count_by_hand() -> None:
    load_SLE = np.array([[[6, 2, 1, 0]], [[0, 0, 3, 1]], [[0, 0, 0, 0]]])
    home = contiguous(1, 4, 2)
    assert home.rank_load(load_SLE[:, 0], 0).tolist() == [[8, 1], [0, 4], [0, 0]]
    judged = judge(load_SLE, home)
    assert judged["straggler"] == pytest.approx((16 / 9 + 2) / 2)  # of the steps with a pair
    assert judged["worst"] == 2.0
    placement = SlotPlan(np.array([[[0, 1, 2], [2, 3, 0]]]), 4)
    # The only token of 2 goes to rank 0.
    assert placement.rank_load(load_SLE[:, 0], 0)[0].tolist() == [3 + 2 + 1, 3]
    assert judge(load_SLE, placement)["extra"] == 2


def test_a_capacity_is_judged_over_the_loads_before_its_drops() -> None:
    asked_SLE = np.array([[[6, 2, 1, 3]]])
    kept_SLE = asked_SLE.clip(max=3)  # γ=1 of 12 pairs and 4 experts
    judged = judge(kept_SLE, contiguous(1, 4, 2), asked_SLE)
    assert judged["straggler"] == 5 / 6
    assert judged["drop_rate"] == pytest.approx(3 / 12)


@pytest.mark.slow
def test_the_straggler_factor_is_the_meters() -> None:
    from capmoe_eval import capacity_aware
    from capmoe_eval.zoo.tiny import tiny_model

    model = tiny_model("olmoe", vocab_size=64)
    torch.manual_seed(0)
    with capacity_aware(model, "score", 1.0, ep_size=2, verify=False) as meter:
        model(input_ids=torch.randint(0, 64, (4, 40)))
    layers = meter.report()["layers"]
    asked_SLE = np.array([[layer["load_before"] for layer in layers]])
    kept_SLE = np.array([[layer["load_after"] for layer in layers]])
    assert (kept_SLE < asked_SLE).any()
    home = contiguous(len(layers), layers[0]["n_experts"], 2)
    for when, load_SLE in (("before", asked_SLE), ("after", kept_SLE)):
        judged = judge(load_SLE, home, asked_SLE)
        measured = [layer["peak"][f"device_{when}"]["last"] for layer in layers]
        assert judged["straggler"] == pytest.approx(np.mean(measured), abs=1e-5)
        assert judged["worst"] == pytest.approx(max(measured), abs=1e-5)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: SlotPlan(np.array([[[0, 1], [1, 1]]]), 3), "expert 2 has no slot in layer 0"),
        (lambda: SlotPlan(np.array([[[0, 7]]]), 2), "expert_LRN=7: must be from 0 to 1"),
        (lambda: SlotPlan(np.array([[0, 1]]), 2), r"loads of shape \[L, R, N\]"),
        (lambda: contiguous(1, 30, 8, 3), "expert 24 has no slot in layer 0"),
        (lambda: plan_eplb([[1.0, 2.0]], 1, 1), "slots=1: .* give at least 2"),
        (lambda: plan_eplb([[1.0, 2.0]], 1, 2, groups=3), "groups=3"),
        (lambda: plan_eplb([[1.0, 2.0]], 1, 2, nodes=2), "nodes=2"),
        (lambda: plan_eplb([[1.0, -2.0]], 1, 2), "load_LE .* of at least 0"),
        (lambda: plan_eplb([1.0, 2.0], 1, 2), r"give loads of shape \[L, E\]"),
        (lambda: compare([[[1, 1]]], 2), "load_SLE has one step: .* give at least 2"),
        (lambda: compare([[[1, 0.5]]] * 2, 2), "load_SLE has type float64: .* as integers"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(call: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named) as error:
        call()
    assert "\n" not in str(error.value)
