"""What the methods decide from scores: activated experts, moved weights, weights of tokens."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import Scores, best_slots, expert_load
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, assign, cases, decide, kept_pairs, one_group

from capmoe_methods.activation import BestFirst
from capmoe_methods.eplb_placement.calibration import experts_of_ranks
from capmoe_methods.macs.decision import UNIT, token_weights
from capmoe_methods.sere import SERE
from capmoe_methods.xshare import XShare, activation_budget

# By hand: the examples of the methods' README files.

SIMILAR = torch.tensor([[1, 0, 0, 0.2], [0, 1, 0.8, 0.1], [0, 0.8, 1, 0], [0.2, 0.1, 0, 1]])
BEST = [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]
SUMS = [[0.5, 0.2, 0.2, 0.1], [0.4, 0.2, 0.25, 0.15], [0.25, 0.25, 0.2, 0.3]]
OTHERS = [[0.5, 0.0, 0.3, 0.2], [0.0, 0.5, 0.3, 0.2]]
FLAT = [[0.90, 0.05, 0.03, 0.02], *[[0.31, 0.28, 0.27, 0.14]] * 3]  # but for the first token
FALLING = [[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.8, 0.2]]
IMAGES = {"image_T": torch.ones(4, dtype=torch.bool), "hidden_TH": torch.zeros(4, 2)}
MACS_WORDS = {"gamma": 1.0, "rho": 0.0, "reroute": "none"}


@pytest.mark.parametrize(
    ("name", "knobs", "scores", "top_k", "expected", "about"),
    [
        ("oea", {"k0": 1}, BEST, 2, [{0, 2}] * 3, {}),
        ("xshare", {"k0": 0, "expert_budget": 0.5}, SUMS, 2, [{0, 1}] * 3, {}),
        ("sere", {"k0": 1}, OTHERS, 3, [{0, 1, 3}, {1, 3}], {"calibrated": SIMILAR}),
        ("laser", {"peak_mass": 0.5, "viable_score": 0.5}, FLAT, 1, [{0}, {1}, {2}, {0}], {}),
        # Two tokens of text fit, or four of an image.
        ("macs", MACS_WORDS, FALLING, 1, [{0}, set(), set(), {0}], {}),
        ("macs", MACS_WORDS | {"delta": 0.0}, [[0.9, 0.1]] * 4, 1, [{0}] * 4, IMAGES),
    ],
)
def test_the_examples(
    name: str,
    knobs: dict[str, Any],
    scores: list[list[float]],
    top_k: int,
    expected: list[set[int]],
    about: dict[str, Any],
) -> None:
    score_TE = torch.tensor(scores)
    of = Scores(score_TE, score_TE.topk(top_k, dim=1).indices)
    kept = kept_pairs(assign(of, create_method(name, **knobs), one_group(len(scores)), **about))
    assert [{e for t, e in kept if t == token} for token in range(len(scores))] == expected


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
    """Slot by slot they add up to the weights of the definition."""
    assume(isinstance(case.method, SERE))  # a similarity above 1 is the baseline
    assignment, tokens = decide(case), case.tokens()
    weights = case.method.combine_weights(tokens)
    assert weights is not None
    sum_TE = np.zeros(tokens.score_TE.shape)
    for token, slots in enumerate(assignment.slot_TK.tolist()):
        for k, slot in enumerate(slots):
            sum_TE[token, assignment.index_TS[token, slot]] += tokens.weight_TK[token, k]
    assert sum_TE == pytest.approx(weights[0])
    changed = set(assignment.changed_T(case.top_k).nonzero().flatten().tolist())
    assert changed == {t for t, _ in set(kept_pairs(assignment)) ^ case.chosen}


# MACS: the weights of tokens, and the capacities of experts.


def test_every_token_weighs_at_least_a_unit() -> None:
    """Four flat tokens and one that is not: at δ=100 the weight of the flat ones is below 2⁻²⁴."""
    hidden_TH, is_image_T = torch.zeros(5, 3), torch.ones(5) > 0
    hidden_TH[0, 0] = 50.0
    units_T = token_weights(hidden_TH, is_image_T, one_group(5), 100.0)
    assert units_T.tolist() == [UNIT, 1, 1, 1, 1]
    assert token_weights(hidden_TH, is_image_T, one_group(5), 0.0).tolist() == [UNIT // 2] * 5


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=[0.1, 0.5, 0.75, 1.0, 1.5, 3.0]))
def test_equal_weights_without_modalities_and_rerouting_are_token_drop(case: Case) -> None:
    """Bit for bit, in the slots as in the pairs."""
    case = case.with_knobs(rho=0.0, reroute="none", ep_size=1)
    text = dataclasses.replace(case, image_T=torch.zeros_like(case.image_T))
    macs, drop = decide(text), decide(case.of(case.method.converted(TokenDrop)))
    assert torch.equal(macs.index_TS, drop.index_TS)
    assert torch.equal(macs.keep_TS, drop.keep_TS)


# placement=eplb: which experts share a device.


def test_experts_go_by_falling_load_to_the_rank_with_the_lowest_load() -> None:
    assert experts_of_ranks([9, 8, 1, 1], 2).tolist() == [[0, 3], [1, 2]]
    assert experts_of_ranks([8, 7, 6, 5, 0, 0, 0, 0], 4).tolist() == [
        *([0, 7], [1, 6], [2, 5], [3, 4])
    ]
    with pytest.raises(UsageError, match=r"^placement=eplb: the calibration saw no token under"):
        experts_of_ranks([0, 0], 2)
    with pytest.raises(UsageError, match="4 experts cannot be spread evenly over 3 ranks"):
        experts_of_ranks([1, 2, 3, 4], 3)
