"""OEA, XShare and SERE: which experts are activated, on scores and on a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.decision import Assignment, Scores, best_slots, expert_load
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.session import capacity_aware
from definitions import sere as reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, cases, decide, kept_pairs
from tests.wrapper.models import batch, called, logits, make, similarities

from capmoe_methods.activation import BestFirst
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


# Two tokens, K = 3; their best experts are 0 and 1. Expert 2 is like 1, 3 like nothing else.


def weights(assignment: Assignment, weight_TK: torch.Tensor) -> dict[tuple[int, int], float]:
    """The weight of every kept pair, by loops over the slots that take weights."""
    sums = dict.fromkeys(kept_pairs(assignment), 0.0)
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
    assert changed == {t for t, _ in set(kept_pairs(assignment)) ^ case.chosen}


# OEA, XShare and SERE on a model: the experts that a forward activates, and the proofs.


# Of the tiny model, which has 8 experts and K = 3, on 8 tokens.
TOKENS = batch(n_sequences=4, n_positions=2)
OEA = create_method("oea", k0=1)
XSHARE = create_method("xshare", k0=0, expert_budget=0.5)
ON_RANKS = create_method("xshare", k0=0, expert_budget=0.5, granularity="device", ep_size=2)
MERGED = create_method("sere", k0=1, min_similarity=0.6)


def active_experts(model: Any, tokens: torch.Tensor = TOKENS) -> list[set[int]]:
    """Return the experts that each layer calls in a forward."""
    with called(model) as calls:
        logits(model, tokens)
    return [set(index_NS[index_NS < 8].tolist()) for index_NS, _ in calls]


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("renormalize", ["before", "after"])
def test_a_bound_that_is_never_reached_gives_the_stock_model(family: str, renormalize: str) -> None:
    """Bit for bit, also where a family normalises its weights or limits a token to groups."""
    model = make(family)
    stock = logits(model, TOKENS)
    top_k = model.config.num_experts_per_tok
    for name, knobs in (("oea", {"k0": top_k}), ("xshare", {"expert_budget": 0.999})):
        with capacity_aware(model, name, renormalize=renormalize, **knobs) as meter:
            assert torch.equal(logits(model, TOKENS), stock)
        assert meter.proofs()["stock_at_infinity"]["method"] == name


@pytest.mark.parametrize("method", [OEA, XSHARE, ON_RANKS, MERGED, create_method("baseline")])
def test_activated_experts_are_those_that_are_called(method: Method) -> None:
    model = make("olmoe")
    stock = active_experts(model)
    with capacity_aware(model, method, calibrated=similarities(model)) as meter:
        active = active_experts(model)
    report = meter.report()
    assert [layer["activated_after"] for layer in report["layers"]] == [*map(len, active)]
    assert report["layers"][0]["activated_before"] == len(stock[0])  # of the same input
    assert report["summary"]["activated_after"] == sum(map(len, active)) / 2
    assert not [name for name, proof in report["proofs"].items() if proof["passed"] is False]
    if method.is_stock:
        assert "best_kept" not in report["proofs"]
        return
    assert report["proofs"]["overload_drops"]["overloaded"] > 0
    assert len(active[0]) < len(stock[0]), "the method changed nothing"
    if method in (OEA, MERGED):
        assert report["proofs"]["best_kept"]["fits"] == 2
    else:
        assert [*map(len, active)] == [4, 4]
    if method == ON_RANKS:
        assert [len(experts & set(range(4))) for experts in active] == [2, 2]


def keep_all(scores: Scores, *_: Any, **__: Any) -> Assignment:
    return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))


def drop_the_best(scores: Scores, *_: Any, **__: Any) -> Assignment:
    """Keep of each token's own experts those that are some token's best, but not of its own."""
    best_T = scores.score_TE.argmax(dim=1)
    usable_TK = torch.isin(scores.topk_TK, best_T)
    return Assignment(scores.topk_TK, usable_TK & (scores.topk_TK != best_T[:, None]))


LINES = {
    "bound_holds": "bound exceeded in",
    "overload_drops": "overloads without a drop",
    "best_kept": "8 tokens without one of their k0 best experts",
}


@pytest.mark.parametrize(
    ("method", "decide", "broken"),
    [
        *((method, keep_all, "bound_holds") for method in (OEA, XSHARE, ON_RANKS, MERGED)),
        *((method, keep_all, "overload_drops") for method in (XSHARE, MERGED)),
        *((method, drop_the_best, "best_kept") for method in (MERGED, OEA)),
        (create_method("xshare", k0=1, expert_budget=0.9), drop_the_best, "best_kept"),
    ],
)
def test_a_decision_that_breaks_the_bound_is_caught(
    monkeypatch: pytest.MonkeyPatch, method: Method, decide: Any, broken: str
) -> None:
    model = make("olmoe")
    with capacity_aware(model, method, calibrated=similarities(model)) as meter:
        monkeypatch.setattr(hook, "decide", decide)
        with pytest.raises(EnforcementError, match=LINES[broken]):
            logits(model, TOKENS)
    assert meter.proofs()[broken]["passed"] is False


def test_decode_steps_alone_are_bounded() -> None:
    """The prompt is the stock model's, and a step's set is that of its four tokens."""
    model, knobs = make("olmoe"), {"expert_budget": 0.25, "decode": "only", "verify": False}
    with capacity_aware(model, "xshare", **knobs) as meter, called(model.model.layers[1]) as calls:
        model.generate(batch(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    active = [len(index_NS[index_NS < 8].unique()) for index_NS, _ in calls]
    assert active[0] > 2, "the prompt is bounded"
    assert active[1:] == [2, 2, 2]
    summary = meter.summary()
    assert summary["decode"]["activated_after"] == summary["activated_after"] == 2
    assert summary["decode"]["activated_before"] > 2
    assert summary["decode"]["effective_gamma"] is None
