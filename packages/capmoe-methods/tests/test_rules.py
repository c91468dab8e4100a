"""What the methods decide from scores: activated experts, moved weights, weights of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import (
    LayerContext,
    Scores,
    TokenGroups,
    best_slots,
    expert_load,
    group_tokens,
)
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import method_class, method_names
from definitions import macs_weights, sere_weights
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, cases, decide, kept_pairs, one_group

from capmoe_methods.activation import BestFirst
from capmoe_methods.eplb_placement.calibration import experts_of_ranks
from capmoe_methods.laser import parts_of_groups
from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import UNIT, token_weights, weigh
from capmoe_methods.sere import SERE
from capmoe_methods.xshare import XShare, activation_budget

# OEA, XShare and SERE: the experts that a batch activates are bounded, and weights are kept.


@pytest.mark.parametrize("name", ["oea", "xshare", "sere"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_more_experts_are_activated_and_every_token_keeps_its_best(
    name: str, data: st.DataObject
) -> None:
    case = data.draw(cases((name,)))
    method, topk_TK, n_experts = case.method, case.scores.topk_TK, case.n_experts
    assume(isinstance(method, BestFirst))  # else it is the baseline
    assert isinstance(method, BestFirst)
    assignment = decide(case)
    is_best_TK = best_slots(case.scores, method.k0)
    demand_E, kept_E, first_E = (
        expert_load(experts, n_experts)
        for experts in (topk_TK, assignment.index_TS[assignment.keep_TS], topk_TK[is_best_TK])
    )
    beyond, _, fits = method.activation_bound(demand_E, kept_E, first_E, case.calibrated)
    assert not beyond.any()
    if fits:
        assert not (is_best_TK & ~assignment.keep_TS[:, : case.top_k]).any()
    assert int(assignment.keep_TS.sum(dim=1).max()) <= case.top_k


# In binary floats 0.28·25 and 0.14·50 are above 7, and 0.07·100 is, too.
@pytest.mark.parametrize(
    ("share", "experts", "ranks"), [(0.28, 25, 1), (0.07, 100, 1), (0.28, 50, 2)]
)
def test_the_share_of_experts_is_parsed_exactly(share: float, experts: int, ranks: int) -> None:
    unit: dict[str, Any] = {"ep_size": ranks, "granularity": "device" if ranks > 1 else "expert"}
    assert activation_budget(XShare(expert_budget=share, **unit), experts) == 7


@settings(max_examples=150, deadline=None)
@given(cases(("sere",)))
def test_weights_of_sere_move_with_the_tokens(case: Case) -> None:
    method, topk_TK = case.method, case.scores.topk_TK
    assume(isinstance(method, SERE))  # ρ above 1 is the baseline
    assignment = decide(case)
    weight_TK = case.scores.score_TE.gather(1, topk_TK)
    sums = dict.fromkeys(kept_pairs(assignment), 0.0)
    for token, slots in enumerate(assignment.slot_TK.tolist()):
        for k, slot in enumerate(slots):
            sums[token, int(assignment.index_TS[token, slot])] += float(weight_TK[token, k])
    assert sums == pytest.approx(sere_weights(case.problem(), method, weight_TK.tolist()))
    changed = set(assignment.changed_T(case.top_k).nonzero().flatten().tolist())
    assert changed == {t for t, _ in set(kept_pairs(assignment)) ^ case.chosen}


# LASER: parts of a group.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_a_part_has_at_most_the_tokens_that_its_width_allows(
    sizes: list[int], load_updates: int
) -> None:
    group_T = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = TokenGroups(group_T, group_T, group_T, tuple(sizes), len(group_T))
    order_T, bounds_P, width = parts_of_groups(groups, len(group_T), load_updates)
    assert sorted(order_T.tolist()) == list(range(len(group_T)))
    assert int(bounds_P[-1]) == len(group_T)
    assert max(bounds_P.diff().tolist(), default=0) <= width


# MACS: the weights of tokens, and the capacities of experts.


GAMMAS = [0.1, 0.5, 0.75, 1.0, 1.5, 3.0]


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_weights_of_macs_are_those_of_the_definition(case: Case) -> None:
    method = case.method
    assert isinstance(method, MACS)
    sizes = {"top_k": case.top_k, "n_experts": case.n_experts}
    units = weigh(method, case.groups, case.context(), **sizes).unit_T.tolist()
    image, group = case.image_T.tolist(), case.groups.group_T.tolist()
    expected = macs_weights(case.hidden_TH.tolist(), image, group, method.delta)
    for unit, weight in zip(units, expected, strict=True):
        assert abs(unit - UNIT * weight) <= 2 + 1e-4 * UNIT * (1 + method.delta)
    assert all(unit == UNIT for unit, of_image in zip(units, image, strict=True) if not of_image)
    if method.delta == 0:
        assert {u for u, of_image in zip(units, image, strict=True) if of_image} <= {UNIT // 2}


def test_every_token_weighs_at_least_a_unit() -> None:
    """Four flat tokens and one that is not: at δ=100 the weight of the flat ones is below 2⁻²⁴."""
    hidden_TH = torch.zeros(5, 3)
    hidden_TH[0, 0] = 50.0
    units_T = token_weights(hidden_TH, torch.ones(5) > 0, one_group(5), 100.0)
    assert units_T.tolist() == [UNIT, 1, 1, 1, 1]


def test_a_group_without_a_token_has_no_weight_of_images() -> None:
    """The second rank's sequence is padding alone, and the third's has no image."""
    counted_BS = torch.tensor([[True, True], [False, False], [True, True]])
    layer = LayerContext(
        calibrated=torch.tensor([1, 0, -1]),
        hidden_TH=torch.arange(8.0).view(4, 2),
        image_T=torch.tensor([True, False, False, False]),
    )
    method, groups = MACS(gamma=1.0, ep_size=3), group_tokens(counted_BS, ep_size=3)
    weighted = weigh(method, groups, layer, top_k=1, n_experts=3)
    assert weighted.visual_ratio_G.tolist() == [pytest.approx(1 / 3), 0.0, 0.0]
    assert weighted.limit_GE[1].tolist() == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_equal_weights_without_modalities_and_rerouting_are_token_drop(case: Case) -> None:
    """Bit for bit, in the slots as in the pairs."""
    case = case.with_knobs(rho=0.0, reroute="none", ep_size=1)
    text = dataclasses.replace(case, image_T=torch.zeros_like(case.image_T))
    macs, drop = decide(text), decide(case.of(case.method.converted(TokenDrop)))
    assert torch.equal(macs.index_TS, drop.index_TS)
    assert torch.equal(macs.keep_TS, drop.keep_TS)


# placement=eplb: which experts share a device, and nothing else, follows the placement.


PLACED = [name for name in method_names() if "placement" in declared_knobs(method_class(name))]


@st.composite
def placed_cases(draw: st.DrawFn, names: Sequence[str] = PLACED) -> Case:
    """Cases of several ranks whose experts are placed at random."""
    case = draw(cases(names, gammas=(0.1, 0.5, 0.75, 1.0, 1.5)))
    n_experts, drawn = case.n_experts, case.method
    assume(n_experts > 1 and "placement" in declared_knobs(type(drawn)))
    ranks = draw(st.sampled_from([r for r in range(2, n_experts + 1) if n_experts % r == 0]))
    local = isinstance(drawn, ExpandedDrop) and drawn.candidates == "local" and draw(st.booleans())
    knobs = {"granularity": "expert" if local else "device", "placement": "eplb"}
    method = dataclasses.replace(drawn, ep_size=ranks, **knobs).canonical()  # type: ignore[type-var]
    assume(method.is_placed)
    return case.of(method)


@settings(max_examples=60, deadline=None)
@given(placed_cases())
def test_blocks_as_a_placement_are_blocks_bit_for_bit(case: Case) -> None:
    blocks_RN = torch.arange(case.n_experts).view(case.method.ep_size, -1)
    by_blocks = decide(case.with_knobs(placement="contiguous"), (1, 2))
    by_placement = decide(case, (1, 2), calibrated=blocks_RN)
    assert torch.equal(by_blocks.index_TS, by_placement.index_TS)
    assert torch.equal(by_blocks.keep_TS, by_placement.keep_TS)


@settings(max_examples=80, deadline=None)
@given(placed_cases(("score", "order", "expanded_drop", "token_reroute", "xshare")))
def test_renumbered_experts_in_blocks_decide_as_the_placement(case: Case) -> None:
    """Without ties: a tie goes to the lower number, which is another after renumbering."""
    old_E = case.calibrated.flatten()  # of each new number
    generator = torch.Generator().manual_seed(case.seed)
    score_TE = torch.rand(case.scores.score_TE.shape, generator=generator, dtype=torch.float64)
    score_TE = (score_TE + 0.01).float()
    topk_TK = score_TE.topk(case.top_k, dim=1).indices
    assume(len(score_TE.unique()) == score_TE.numel())
    placed = dataclasses.replace(case, scores=Scores(score_TE, topk_TK))
    renumbered = Scores(score_TE[:, old_E], old_E.argsort()[topk_TK])
    blocks = dataclasses.replace(case, scores=renumbered).with_knobs(placement="contiguous")
    pairs = {(token, int(old_E[new])) for token, new in kept_pairs(decide(blocks))}
    assert set(kept_pairs(decide(placed))) == pairs


def test_experts_go_by_falling_load_to_the_rank_with_the_lowest_load() -> None:
    assert experts_of_ranks([9, 8, 1, 1], 2).tolist() == [[0, 3], [1, 2]]
    assert experts_of_ranks([8, 7, 6, 5, 0, 0, 0, 0], 4).tolist() == [
        *([0, 7], [1, 6], [2, 5], [3, 4]),
    ]
    with pytest.raises(UsageError, match=r"^placement=eplb: the calibration saw no token under"):
        experts_of_ranks([0, 0], 2)
    with pytest.raises(UsageError, match="4 experts cannot be spread evenly over 3 ranks"):
        experts_of_ranks([1, 2, 3, 4], 3)
