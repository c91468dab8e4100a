"""OEA: its set of experts, its identity and label, and its refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.batch_demand import best_own
from capmoe_eval.extensions.oea import OEA
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Scores
from tests.extensions.activation import decide_masked, kept
from tests.routing.drawing import drawing
from tests.routing.problems import Case, cases, decide, kept_pairs
from tests.routing.test_canonical import are_alike, are_different


def test_slots_are_filled_with_experts_that_others_need() -> None:
    """Experts 0 and 2 are active; every token's second slot takes the other one of them."""
    assert kept(OEA(k0=1)) == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    assert kept(OEA(k0=2)) == kept(Baseline())


def test_a_token_takes_no_expert_that_its_groups_rule_out() -> None:
    assert decide_masked(OEA(k0=1)) == [(0, 0), (0, 2), (1, 0), (2, 2)]


@settings(max_examples=80, deadline=None)
@given(cases(("oea",)))
def test_the_best_experts_of_all_tokens_are_active_and_every_token_keeps_its_best(
    case: Case,
) -> None:
    scores, assignment = case.scores, decide(case)
    pairs = kept_pairs(assignment)
    assert max(Counter(token for token, _ in pairs).values(), default=0) <= case.top_k
    best_TK = best_own(scores, case.method.setting("k0"))
    assert {expert for _, expert in pairs} == set(scores.topk_TK[best_TK].tolist())
    assert not bool((best_TK & ~assignment.keep_TS[:, : case.top_k]).any())


def test_golden() -> None:
    path = Path(__file__).with_name("golden.txt")
    assert drawing([OEA(k0=1)]) == path.read_text(encoding="utf-8")


def test_what_has_no_effect_is_no_part_of_the_identity() -> None:
    knobs = {"ep_size": 8, "modality": "image_first", "rounds": 7}
    are_alike(("oea", 1.0, knobs), ("oea", None, {"scope": "sequence"}))
    are_different(("oea", 1.0, {"k0": 99}), ("baseline", None, {}))  # K is not known here
    assert create_method("oea", 1.0, ep_size=8, decode="only").label == "oea-only-k1"


def test_a_token_keeps_at_least_its_best_expert() -> None:
    with pytest.raises(UsageError, match=r"^k0=0: with OEA every token keeps its best expert; set"):
        OEA(k0=0)
    with pytest.raises(UsageError, match=r"^k0=3: a token of this model has 2 experts; choose"):
        OEA(k0=3).check_layers(1, n_experts=8, top_k=2)


def test_never_binding_changes_nothing() -> None:
    score_TE = torch.rand(9, 8, generator=torch.Generator().manual_seed(0))
    top_k = 3
    scores = Scores(score_TE, score_TE.topk(top_k, dim=1).indices)
    method = OEA(k0=1).never_binding(8, top_k)
    assert kept(method, scores) == kept(Baseline(), scores) != kept(OEA(k0=1), scores)
