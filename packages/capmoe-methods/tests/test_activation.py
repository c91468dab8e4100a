"""OEA, XShare and SERE: the experts that a batch activates are bounded, and weights are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capmoe_eval.routing.decision import expert_load
from capmoe_eval.routing.scores import Assignment, best_slots
from definitions import sere as reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, cases, decide, kept_pairs

from capmoe_methods.activation import BestFirst
from capmoe_methods.sere import SERE
from capmoe_methods.xshare import XShare, activation_budget


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


# Two tokens, K = 3; their best experts are 0 and 1. Expert 2 is like 1, 3 like nothing else.


def weights(assignment: Assignment, weight_TK: torch.Tensor) -> dict[tuple[int, int], float]:
    """The weight of every kept pair, by loops over the slots that take weights."""
    sums = dict.fromkeys(kept_pairs(assignment), 0.0)
    assert assignment.slot_TK is not None
    for token, slots in enumerate(assignment.slot_TK.tolist()):
        for k, slot in enumerate(slots):
            sums[token, int(assignment.index_TS[token, slot])] += float(weight_TK[token, k])
    return sums


@settings(max_examples=150, deadline=None)
@given(cases(("sere",)))
def test_weights_of_sere_move_with_the_tokens(case: Case) -> None:
    method, topk_TK = case.method, case.scores.topk_TK
    assume(isinstance(method, SERE))  # ρ above 1 is the baseline
    assignment = decide(case)
    weight_TK = case.scores.score_TE.gather(1, topk_TK)
    expected = reference.weights(case.problem(), method, weight_TK.tolist())
    assert weights(assignment, weight_TK) == pytest.approx(expected)
    changed = set(assignment.changed_T(case.top_k).nonzero().flatten().tolist())
    assert changed == {t for t, _ in set(kept_pairs(assignment)) ^ case.own}
