"""SERE: tokens of secondary experts go to the most similar primary expert, with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.batch_demand import best_own
from capmoe_eval.extensions.sere import SERE
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.extensions.sere import reference
from tests.routing.drawing import drawing
from tests.routing.problems import Case, assign, cases, decide, kept_pairs
from tests.routing.test_canonical import are_alike, are_different

# Two tokens, K = 3; their best experts are 0 and 1. Expert 2 is like 1, 3 like nothing else.
SCORES = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.6, 0.3, 0.1]])
SIMILARITY = torch.tensor(
    [[1.0, 0.5, 0.4, 0.1], [0.5, 1.0, 0.8, 0.2], [0.4, 0.8, 1.0, 0.0], [0.1, 0.2, 0.0, 1.0]]
)


def kept(min_similarity: float, similarity_EE: torch.Tensor = SIMILARITY) -> list[tuple[int, int]]:
    scores = Scores(SCORES, SCORES.topk(3, dim=1).indices)
    groups = group_tokens(torch.ones(1, 2, dtype=torch.bool))
    method = SERE(min_similarity=min_similarity)
    return sorted(kept_pairs(assign(scores, method, groups, calibrated=similarity_EE)))


def test_secondary_experts_give_their_tokens_to_the_most_similar_primary_one() -> None:
    """2 gives them to 1, where its second token is already; 3 keeps its own if ρ protects it."""
    assert kept(0.3) == [(0, 0), (0, 1), (0, 3), (1, 1), (1, 3)]
    assert kept(0.2) == [(0, 0), (0, 1), (1, 1)]  # a similarity of ρ itself is enough
    assert kept(0.9) == [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert kept(0.0, torch.ones(4, 4)) == [(0, 0), (1, 0), (1, 1)]  # the lower of equals


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
def test_weights_are_conserved_and_the_activated_experts_are_bounded(case: Case) -> None:
    method, scores = case.method, case.scores
    assignment = decide(case)
    topk_TK = scores.topk_TK
    if not isinstance(method, SERE):  # ρ above 1
        assert assignment.slot_TK is None and bool(assignment.keep_TS.all())
        return
    weight_TK = scores.score_TE.gather(1, topk_TK)
    weight = weights(assignment, weight_TK)
    expected = reference.weights(case.problem(), method, weight_TK.tolist())
    assert weight == pytest.approx(expected)
    for token, row in enumerate(weight_TK.tolist()):
        assert sum(w for (t, _), w in weight.items() if t == token) == pytest.approx(sum(row))
    before, after = set(topk_TK.unique().tolist()), {expert for _, expert in weight}
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


def test_golden() -> None:
    path = Path(__file__).with_name("golden.txt")
    similarity_EE = torch.tensor(
        [[1.0, 0.2, 0.4, 0.3], [0.2, 1.0, 0.6, 0.1], [0.4, 0.6, 1.0, 0.7], [0.3, 0.1, 0.7, 1.0]]
    )
    methods = [SERE(k0=1, min_similarity=0.3)]
    assert drawing(methods, similarity_EE) == path.read_text(encoding="utf-8")


def test_settings_that_decide_alike_are_one_method() -> None:
    are_alike(("sere", 1.0, {"min_similarity": 1.01, "k0": 2}), ("baseline", None, {}))
    are_alike(("sere", 1.0, {"ep_size": 8, "renormalize": "after"}), ("sere", None, {}))
    are_different(("sere", 1.0, {"k0": 99}), ("baseline", None, {}))  # K is not known here
    are_different(("sere", 1.0, {"min_similarity": 1.0}), ("baseline", None, {}))


def test_its_label_has_the_similarity() -> None:
    method = create_method("sere", min_similarity=0.5, decode="only")
    assert method.label == "sere-only-k1-sim0.5" and method.calibration == "expert_similarity"


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"k0": 0}, "k0=0: with SERE every token keeps its best expert"),
        ({"min_similarity": -0.1}, "min_similarity=-0.1: must be a number of at least 0, for ex"),
        ({"min_similarity": True}, "min_similarity=true: must be a number"),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        create_method("sere", **knobs)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
