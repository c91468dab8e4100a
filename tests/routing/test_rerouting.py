"""SERE: tokens of secondary experts go to the most similar primary expert, with their weights."""

from __future__ import annotations

import pytest
import torch
from capmoe_eval.routing.activation import best_own
from capmoe_eval.routing.assign import assign
from capmoe_eval.routing.groups import group_tokens
from capmoe_eval.routing.reference import sere_weights_reference
from hypothesis import given, settings

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores
from tests.routing.problems import Case, cases, decide, kept_pairs

# Two tokens, K = 3; their best experts are 0 and 1. Expert 2 is like 1, 3 like nothing else.
SCORES = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.6, 0.3, 0.1]])
SIMILARITY = torch.tensor(
    [[1.0, 0.5, 0.4, 0.1], [0.5, 1.0, 0.8, 0.2], [0.4, 0.8, 1.0, 0.0], [0.1, 0.2, 0.0, 1.0]]
)


def kept(min_similarity: float, similarity_EE: torch.Tensor = SIMILARITY) -> list[tuple[int, int]]:
    scores = Scores(SCORES, SCORES.topk(3, dim=1).indices)
    groups = group_tokens(torch.ones(1, 2, dtype=torch.bool))
    method = Method("sere", min_similarity=min_similarity)
    assignment = assign(scores, method, groups, calibrated=similarity_EE)
    return sorted(kept_pairs(assignment.index_TS, assignment.keep_TS))


def test_secondary_experts_give_their_tokens_to_the_most_similar_primary_one() -> None:
    """2 gives them to 1, where its second token is already; 3 keeps its own if ρ protects it."""
    assert kept(0.3) == [(0, 0), (0, 1), (0, 3), (1, 1), (1, 3)]
    assert kept(0.2) == [(0, 0), (0, 1), (1, 1)]  # a similarity of ρ itself is enough
    assert kept(0.9) == [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert kept(0.0, torch.ones(4, 4)) == [(0, 0), (1, 0), (1, 1)]  # the lower of equals


def weights(assignment: Assignment, weight_TK: torch.Tensor) -> dict[tuple[int, int], float]:
    """The weight of every kept pair, by loops over the slots that take weights."""
    found = dict.fromkeys(kept_pairs(assignment.index_TS, assignment.keep_TS), 0.0)
    assert assignment.slot_TK is not None
    for token, slots in enumerate(assignment.slot_TK.tolist()):
        for k, slot in enumerate(slots):
            found[token, int(assignment.index_TS[token, slot])] += float(weight_TK[token, k])
    return found


@settings(max_examples=150, deadline=None)
@given(cases(("sere",)))
def test_weights_are_conserved_and_the_activated_experts_are_bounded(case: Case) -> None:
    method, scores = case.method, case.scores
    assignment = decide(case)
    topk_TK = scores.topk_TK
    if method.is_stock:  # ρ above 1
        assert assignment.slot_TK is None and bool(assignment.keep_TS.all())
        return
    weight_TK = scores.score_TE.gather(1, topk_TK)
    found = weights(assignment, weight_TK)
    wanted = sere_weights_reference(case.problem(), method, weight_TK.tolist())
    assert found == pytest.approx(wanted)
    for token, row in enumerate(weight_TK.tolist()):
        assert sum(w for (t, _), w in found.items() if t == token) == pytest.approx(sum(row))
    before, after = set(topk_TK.unique().tolist()), {expert for _, expert in found}
    primary = set(topk_TK[best_own(scores, method.k0)].tolist())
    assert primary <= after <= before
    if method.min_similarity == 0 or method.k0 >= case.top_k:
        assert after == primary
    changed = assignment.changed_T(case.top_k).tolist()
    for token, own in enumerate(topk_TK.tolist()):
        assert not (set(own) <= primary and changed[token])
    if method.k0 >= case.top_k:
        assert not any(changed)
    assert int(assignment.keep_TS.sum(dim=1).max()) <= case.top_k
