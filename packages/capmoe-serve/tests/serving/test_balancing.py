from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.balancing import compare, halves, judge, judge_least_loaded
from capmoe_serve.planners import LeastLoaded, least_loaded, plan_eplb
from capmoe_serve.slots import (
    Counts,
    SlotPlan,
    Split,
    contiguous,
    program_shares,
    split_tokens,
)
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
FREE = LeastLoaded(least=1, threshold=0.5)  # everything above the mean moves


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


def eplb_for(load_SLE: Counts, ranks: int, slots: int) -> SlotPlan:
    """Return a placement planned on the last step."""
    return plan_eplb(load_SLE[-1], ranks, slots)


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
    assert placement.expert_LRN.shape == (len(load_LE), ranks, slots)
    assert (placement.replicas_LE >= 1).all()
    assert (placement.replicas_LE.sum(axis=1) == ranks * slots).all()
    if groups % nodes == 0 and nodes > 1:  # a group's replicas stay on one node
        group_LRN = placement.expert_LRN // (n_experts // groups)
        by_node = group_LRN.reshape(len(load_LE), nodes, -1)
        for layer, group in itertools.product(range(len(load_LE)), range(groups)):
            assert (by_node[layer] == group).any(axis=1).sum() == 1


@settings(max_examples=25, deadline=None)
@given(problems())
def test_every_split_computes_each_pair_once(problem: tuple[Counts, int, int]) -> None:
    load_SLE, ranks, slots = problem
    placement = eplb_for(load_SLE, ranks, slots)
    steps, layers, n_experts = load_SLE.shape
    share_SLP = program_shares(load_SLE, placement)
    robin_SLP, whole_SLP = (split_tokens(load_SLE, placement, split) for split in get_args(Split))
    for tokens_SLP, expert in itertools.product(
        (share_SLP, robin_SLP, whole_SLP), range(n_experts)
    ):
        of_expert_SLP = np.where(placement.expert_LP == expert, tokens_SLP, 0)
        assert of_expert_SLP.sum(axis=2) == pytest.approx(load_SLE[:, :, expert])
    by_rank = [
        tokens_SLP.reshape(steps, layers, ranks, slots)
        for tokens_SLP in (robin_SLP, share_SLP, whole_SLP)
    ]
    fullest_SL = by_rank[1].sum(axis=3).max(axis=2)
    robin_SLRN, share_SLRN, whole_SLRN = (tokens_SLRN.tolist() for tokens_SLRN in by_rank)
    for step, layer in itertools.product(range(steps), range(layers)):
        slots_RN = placement.expert_LRN[layer].tolist()
        loads = load_SLE[step, layer].tolist()
        assert robin_SLRN[step][layer] == reference.round_robin(loads, slots_RN)
        shares_RN = share_SLRN[step][layer]
        whole_RN = reference.largest_remainder(loads, slots_RN, shares_RN)
        assert whole_SLRN[step][layer] == whole_RN
        lowest = reference.lowest_fullest_rank(loads, slots_RN)
        assert fullest_SL[step, layer] == pytest.approx(lowest, abs=1e-5)
    # Rounding raises a slot by less than a token.
    whole_SL = judge("LPLB", load_SLE, placement, "lp").load_SLR.max(axis=2)
    assert (whole_SL < fullest_SL + slots + 1e-6).all()
    assert (whole_SL >= np.ceil(fullest_SL - 1e-5)).all()


def test_more_steps_than_are_judged_at_once() -> None:
    load_SLE = np.random.default_rng(0).integers(0, 90, (103, 1, 8))
    placement = plan_eplb(load_SLE.sum(axis=0), 4, 3)
    share_SRN = program_shares(load_SLE, placement).reshape(103, 4, 3)
    fullest_S = share_SRN.sum(axis=2).max(axis=1)
    slots = placement.expert_LRN[0].tolist()
    lowest = [reference.lowest_fullest_rank(row, slots) for row in load_SLE[:, 0].tolist()]
    assert fullest_S == pytest.approx(np.array(lowest), abs=1e-4)
    judged_SLR = judge("LPLB", load_SLE, placement, "lp").load_SLR
    whole_SLP = split_tokens(load_SLE, placement, "lp")
    assert (judged_SLR == whole_SLP.reshape(103, 1, 4, 3).sum(axis=3)).all()
    free_S = judge_least_loaded(load_SLE, 4, FREE).load_SLR.max(axis=2)[:, 0]
    assert free_S.tolist() == (-(-load_SLE.sum(axis=(1, 2)) // 4)).tolist()


@settings(max_examples=60, deadline=None)
@given(
    problems(),
    st.sampled_from([0.8, 1.0, 1.1, 2.0]),
    st.integers(1, 9),
    st.sampled_from([0.5, 1.0, 1.3, 3.0]),
    st.sampled_from(["expert", "rank"]),
)
def test_llep_follows_its_definition_and_computes_each_pair_once(
    problem: tuple[Counts, int, int], alpha: float, least: int, threshold: float, imbalance: Any
) -> None:
    load_SLE, ranks, _ = problem
    knobs = LeastLoaded(alpha, least, threshold, imbalance)
    load_XE = load_SLE.reshape(-1, load_SLE.shape[2])
    tokens_XRE = least_loaded(load_XE, ranks, knobs)
    expected = [reference.llep(row, ranks, knobs) for row in load_XE.tolist()]
    assert tokens_XRE.tolist() == expected
    assert (tokens_XRE.sum(axis=1) == load_XE).all()


def test_outcomes_count_by_hand() -> None:
    load_SLE = np.array([[[6, 2, 1, 0]], [[0, 0, 3, 1]], [[0, 0, 0, 0]]])
    home = judge("contiguous", load_SLE, contiguous(1, 4, 2))
    assert home.load_SLR.tolist() == [[[8, 1]], [[0, 4]], [[0, 0]]]
    assert home.straggler_SL[:2, 0] == pytest.approx([16 / 9, 2.0])
    assert np.isnan(home.straggler_SL[2, 0])
    assert home.active_SLR.tolist() == [[[2, 1]], [[0, 2]], [[0, 0]]]
    assert home.summary().straggler == pytest.approx((16 / 9 + 2) / 2)
    placement = SlotPlan(np.array([[[0, 1, 2], [2, 3, 0]]]), 4)
    spread = judge("spread", load_SLE, placement, before=contiguous(1, 4, 2))
    assert spread.load_SLR[0].tolist() == [[3 + 2 + 1, 3]]  # the only token of 2 goes to rank 0
    assert spread.active_SLR[0].tolist() == [[3, 1]]
    assert spread.extra_SL[0, 0] == 2
    assert spread.set_up_L.tolist() == [2]  # 2 to the first rank, 0 to the second
    # m_α = 5: expert 0 keeps 3 beside expert 1's 2, and 3 of its pairs follow its weights.
    moved = judge_least_loaded(load_SLE[:1], 2, FREE)
    assert moved.load_SLR.tolist() == [[[5, 4]]]
    assert (moved.moved_SL.tolist(), moved.redirected_SL.tolist()) == ([[1]], [[3]])
    assert moved.extra_SL.tolist() == [[1]]
    assert spread.active_SLR.sum(axis=2)[:, 0].tolist() == [4, 3, 0]


def test_a_capacity_is_judged_over_the_loads_before_its_drops() -> None:
    asked_SLE = np.array([[[6, 2, 1, 3]]])
    kept_SLE = asked_SLE.clip(max=3)  # γ=1 of 12 pairs and 4 experts
    capped = judge("γ=1", kept_SLE, contiguous(1, 4, 2), asked_SLE=asked_SLE)
    assert capped.straggler_SL.tolist() == [[5 / 6]]
    assert capped.summary().drop_rate == pytest.approx(3 / 12)
    with pytest.raises(UsageError, match="asked_SLE"):
        judge("γ=1", asked_SLE, contiguous(1, 4, 2), asked_SLE=kept_SLE)


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
        outcome = judge(when, load_SLE, home, asked_SLE=asked_SLE)
        measured = [layer["peak"][f"device_{when}"]["last"] for layer in layers]
        assert outcome.straggler_SL[0].tolist() == pytest.approx(measured, abs=1e-5)


def test_a_comparison_plans_on_the_first_half_alone() -> None:
    planned_SLE = np.tile([[[9, 9, 1, 1]]], (4, 1, 1))
    judged_SLE = np.tile([[[1, 9, 9, 1]]], (5, 1, 1))
    load_SLE = np.concatenate([planned_SLE, judged_SLE])
    assert [len(half) for half in halves(load_SLE)] == [4, 5]
    outcomes = {each.method: each for each in compare(load_SLE, 2, settings=FREE)}
    assert list(outcomes) == ["contiguous", "EPLB", "EPLB+2", "LPLB+2", "LLEP"]
    assert {len(each.asked_SL) for each in outcomes.values()} == {5}
    # 0 and 1 were hot and were parted, 0 with 2; of the judged steps 1 and 2 are.
    factors = {name: each.summary().straggler for name, each in outcomes.items()}
    assert factors["EPLB"] == 1.0
    turned = {each.method: each for each in compare(load_SLE[::-1], 2, settings=FREE)}
    assert turned["EPLB"].straggler_SL.tolist() != outcomes["EPLB"].straggler_SL.tolist()
    assert factors["LPLB+2"] <= factors["EPLB+2"] <= factors["contiguous"]
    assert factors["LLEP"] == 1.0
    assert outcomes["LLEP"].moved_SL.sum() == 0
    with pytest.raises(UsageError, match="one step"):
        halves(load_SLE[:1])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: SlotPlan(np.array([[[0, 1], [1, 1]]]), 3), "expert 2 has no slot in layer 0"),
        (lambda: SlotPlan(np.array([[[0, 7]]]), 2), "expert_LRN=7: must be from 0 to 1"),
        (lambda: SlotPlan(np.array([[0, 1]]), 2), r"loads of shape \[L, R, N\]"),
        (lambda: contiguous(1, 30, 8), "ranks=8: 30 experts .* 10, 15, 30"),
        (lambda: plan_eplb([[1.0, 2.0]], 1, 1), "slots=1: .* give at least 2"),
        (lambda: plan_eplb([[1.0, 2.0]], 1, 2, groups=3), "groups=3"),
        (lambda: plan_eplb([[1.0, 2.0]], 1, 2, nodes=2), "nodes=2"),
        (lambda: plan_eplb([[1.0, -2.0]], 1, 2), "load_LE .* of at least 0"),
        (lambda: plan_eplb([1.0, 2.0], 1, 2), r"give loads of shape \[L, E\]"),
        (lambda: least_loaded([[0.5, 1.0]], 1, FREE), "load_XE has type float64"),
        (lambda: LeastLoaded(alpha=0), "alpha=0"),
        (lambda: LeastLoaded(imbalance="experts"), "did you mean 'expert'"),  # type: ignore[arg-type]
        (lambda: split_tokens([[[1, 1]]], contiguous(1, 2, 1), "robin"), "split=robin"),  # type: ignore[arg-type]
        (lambda: split_tokens([[[1, 1]]], contiguous(2, 2, 1), "lp"), "the placement has 2 layers"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(call: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named) as error:
        call()
    assert "\n" not in str(error.value)
