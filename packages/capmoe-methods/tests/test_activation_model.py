"""OEA, XShare and SERE on a model: the experts that a forward activates, and the proofs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, called, logits, make, similarities

# Of the tiny model, which has 8 experts and K = 3, on 8 tokens.
TOKENS = batch(n_sequences=4, n_positions=2)
OEA = create_method("oea", k0=1)
XSHARE = create_method("xshare", k0=0, expert_budget=0.5)
ON_RANKS = create_method("xshare", k0=0, expert_budget=0.5, granularity="device", ep_size=2)
SERE = create_method("sere", k0=1, min_similarity=0.6)


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


@pytest.mark.parametrize("method", [OEA, XSHARE, ON_RANKS, SERE, create_method("baseline")])
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
    if method in (OEA, SERE):
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
        *((method, keep_all, "bound_holds") for method in (OEA, XSHARE, ON_RANKS, SERE)),
        *((method, keep_all, "overload_drops") for method in (XSHARE, SERE)),
        *((method, drop_the_best, "best_kept") for method in (SERE, OEA)),
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
