"""XShare: its set of experts under a budget, its identity and label, and its refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.batch_demand import batch_demand, best_own
from capmoe_eval.extensions.xshare import XShare
from capmoe_eval.extensions.xshare.decision import (
    activation_budget,
    budgeted_units,
    experts_under_budget,
)
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Scores
from tests.extensions.activation import decide_masked, kept
from tests.routing.drawing import drawing
from tests.routing.problems import Case, cases, decide, kept_pairs
from tests.routing.test_canonical import are_alike, are_different


def test_the_set_has_the_highest_sums_after_the_tokens_best() -> None:
    """The sums are 1.15, 0.65, 0.65 and 0.55; the lower of two equal ones goes first."""
    assert kept(XShare(k0=0, expert_budget=0.25)) == [(0, 0), (1, 0), (2, 0)]
    by_sum = kept(XShare(k0=0, expert_budget=0.5))
    assert by_sum == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    best_first = kept(XShare(k0=1, expert_budget=0.5))  # 2 is the third token's best
    assert best_first == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    on_ranks = XShare(k0=0, expert_budget=0.5, ep_size=2, granularity="device")
    assert {expert for _, expert in kept(on_ranks)} == {0, 2}  # one of each rank


# In binary floats 0.28·25 and 0.14·50 are above 7, and 0.07·100 is, too.
@pytest.mark.parametrize(
    ("share", "experts", "ranks"), [(0.28, 25, 1), (0.07, 100, 1), (0.28, 50, 2)]
)
def test_the_share_of_experts_is_parsed_exactly(share: float, experts: int, ranks: int) -> None:
    unit: dict[str, Any] = {"ep_size": ranks, "granularity": "device" if ranks > 1 else "expert"}
    assert activation_budget(XShare(expert_budget=share, **unit), experts) == 7


def test_a_token_takes_no_expert_that_its_groups_rule_out() -> None:
    method = XShare(k0=1, expert_budget=0.5)
    assert decide_masked(method) == [(0, 0), (0, 2), (1, 0), (2, 2)]


@settings(max_examples=120, deadline=None)
@given(cases(("xshare",)))
def test_what_is_activated_is_bounded_and_the_best_are_kept(case: Case) -> None:
    method, scores = case.method, case.scores
    assume(isinstance(method, XShare))  # with a budget of all experts it is the baseline
    assert isinstance(method, XShare)
    assignment = decide(case)
    pairs = kept_pairs(assignment)
    assert max(Counter(token for token, _ in pairs).values(), default=0) <= case.top_k
    best_TK = best_own(scores, method.k0)
    lost_TK = best_TK & ~assignment.keep_TS[:, : case.top_k]
    local = case.n_experts // budgeted_units(method)
    budget = activation_budget(method, case.n_experts)
    active = {expert for _, expert in pairs}
    assert max(Counter(expert // local for expert in active).values(), default=0) <= budget
    best = set(scores.topk_TK[best_TK].tolist())
    if max(Counter(expert // local for expert in best).values(), default=0) <= budget:
        assert not bool(lost_TK.any())
    if method.k0 == 0:  # no set of that size has a higher sum
        demand_2E = batch_demand(scores, 0)
        chosen_E = experts_under_budget(demand_2E, method)
        chosen_U = (demand_2E[1] * chosen_E).view(-1, local).sum(dim=1)
        most_U = demand_2E[1].view(-1, local).sort(dim=1, descending=True).values[:, :budget]
        assert torch.equal(chosen_U, most_U.sum(dim=1))


def test_golden() -> None:
    path = Path(__file__).with_name("golden.txt")
    by_rank = XShare(k0=0, expert_budget=0.5, granularity="device", ep_size=2)
    methods = [XShare(k0=1, expert_budget=0.75), by_rank]
    assert drawing(methods) == path.read_text(encoding="utf-8")


def test_settings_that_decide_alike_are_one_method() -> None:
    are_alike(("xshare", 1.0, {"expert_budget": 1.0}), ("baseline", None, {}))
    are_alike(("xshare", 1.0, {"ep_size": 8}), ("xshare", None, {"granularity": "device"}))
    are_different(("xshare", 1.0, {"k0": 0}), ("xshare", None, {}))


def test_its_label_has_the_budget() -> None:
    by_rank = {"ep_size": 8, "granularity": "device", "k0": 0, "expert_budget": 0.25}
    assert create_method("xshare", ep_size=8).label == "xshare-k1-b0.5"
    assert create_method("xshare", **by_rank).label == "xshare-ep8-device-k0-b0.25"


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"k0": -1}, "k0=-1: must be a whole number of at least 0"),
        ({"expert_budget": 8}, "expert_budget=8: must be a number above 0 and at most 1, for ex"),
        ({"expert_budget": 0}, "expert_budget=0: must be a number above 0 and at most 1"),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        create_method("xshare", **knobs)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_never_binding_changes_nothing() -> None:
    score_TE = torch.rand(9, 8, generator=torch.Generator().manual_seed(0))
    scores = Scores(score_TE, score_TE.topk(3, dim=1).indices)
    method = XShare(expert_budget=0.3)
    assert kept(method.never_binding(8, 3), scores) == kept(Baseline(), scores)
    assert kept(method, scores) != kept(Baseline(), scores)
