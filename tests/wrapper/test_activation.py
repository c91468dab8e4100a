"""OEA, XShare and SERE on a model: the experts that a forward activates, and the proofs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make, similarities
from tests.wrapper.test_session import experts_input, run

# Of the tiny model, which has 8 experts and K = 3, on 8 tokens.
BATCH = {"tokens": batch(n_sequences=4, n_positions=2)}
OEA = create_method("oea", k0=1)
XSHARE = create_method("xshare", k0=0, expert_budget=0.5)
ON_RANKS = create_method("xshare", k0=0, expert_budget=0.5, granularity="device", ep_size=2)
SERE = create_method("sere", k0=1, min_similarity=0.6)


def active(index_NS: torch.Tensor) -> set[int]:
    return set(index_NS[index_NS < 8].tolist())


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_a_bound_that_is_never_reached_gives_the_stock_model(family: str) -> None:
    """Bit for bit, also where a family normalises its weights or limits a token to groups."""
    model = make(family)
    stock = run(model, **BATCH)
    top_k = model.config.num_experts_per_tok
    for method in (create_method("oea", k0=top_k), create_method("xshare", expert_budget=0.999)):
        for renormalize in ("before", "after"):
            with capacity_aware(model, method.name, **knobs(method, renormalize)) as meter:
                assert torch.equal(run(model, **BATCH), stock)
            assert meter.proofs()["stock_at_infinity"]["method"] == method.name


def knobs(method: Method, renormalize: str) -> dict[str, Any]:
    given = method.identity() | {"renormalize": renormalize}
    del given["method"]
    return given


@pytest.mark.parametrize("method", [OEA, XSHARE, ON_RANKS, SERE, create_method("baseline")])
def test_activated_experts_are_those_that_are_called(method: Method) -> None:
    model = make("olmoe")
    stock = experts_input(model, **BATCH)
    with capacity_aware(model, method, calibrated=similarities(model)) as meter:
        called = experts_input(model, **BATCH)
    report = meter.report()
    for layer, index_NS in zip(report["layers"], called, strict=True):
        assert layer["activated_after"] == len(active(index_NS))
    assert report["layers"][0]["activated_before"] == len(active(stock[0]))  # of the same input
    of_layers = [layer["activated_after"] for layer in report["layers"]]
    assert report["summary"]["activated_after"] == sum(of_layers) / 2
    assert all(promise["passed"] is not False for promise in report["proofs"].values())
    if method.is_stock:
        assert "best_kept" not in report["proofs"]
        return
    assert report["proofs"]["overload_drops"]["overloaded"] > 0
    assert len(active(called[0])) < len(active(stock[0])), "the method changed nothing"
    if method in (OEA, SERE):
        assert report["proofs"]["best_kept"]["fits"] == 2
    elif method == ON_RANKS:
        assert all(len(active(index) & set(range(4))) == 2 for index in called)
        assert all(len(active(index) - set(range(4))) == 2 for index in called)
    else:
        assert all(len(active(index)) == 4 for index in called)


def keep_all(scores: Scores, *_: Any, **__: Any) -> Assignment:
    return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))


def drop_the_best(scores: Scores, *_: Any, **__: Any) -> Assignment:
    """Keep of each token's own experts those that are some token's best, but not of its own."""
    best_T = scores.score_TE.argmax(dim=1)
    usable_TK = torch.isin(scores.topk_TK, best_T)
    return Assignment(scores.topk_TK, usable_TK & (scores.topk_TK != best_T[:, None]))


@pytest.mark.parametrize(
    ("method", "decide", "promise", "line"),
    [
        (OEA, keep_all, "bound_holds", "bound exceeded in"),
        (XSHARE, keep_all, "bound_holds", "bound exceeded in"),
        (ON_RANKS, keep_all, "bound_holds", "bound exceeded in"),
        (XSHARE, keep_all, "overload_drops", "overloads without a drop"),
        (SERE, keep_all, "bound_holds", "bound exceeded in"),
        (SERE, keep_all, "overload_drops", "overloads without a drop"),
        (SERE, drop_the_best, "best_kept", "8 tokens without one of their k0 best experts"),
        (OEA, drop_the_best, "best_kept", "8 tokens without one of their k0 best experts"),
        (
            create_method("xshare", k0=1, expert_budget=0.9),
            drop_the_best,
            "best_kept",
            "8 tokens without one of their k0 best experts",
        ),
    ],
)
def test_a_decision_that_breaks_the_bound_is_caught(
    monkeypatch: pytest.MonkeyPatch, method: Method, decide: Any, promise: str, line: str
) -> None:
    model = make("olmoe")
    with capacity_aware(model, method, calibrated=similarities(model)) as meter:
        monkeypatch.setattr(hook, "decide", decide)
        with pytest.raises(EnforcementError, match=line):
            run(model, **BATCH)
    assert meter.proofs()[promise]["passed"] is False


def test_a_budget_that_the_best_experts_exceed_says_so() -> None:
    model = make("olmoe")
    with capacity_aware(model, "xshare", k0=3, expert_budget=0.125) as meter:
        run(model, **BATCH)
    proofs = meter.proofs()
    assert proofs["bound_holds"]["passed"]
    assert proofs["best_kept"]["passed"] is None and "never fitted" in proofs["best_kept"]["why"]


def test_more_best_experts_than_a_token_has_are_refused() -> None:
    with (
        pytest.raises(UsageError, match="k0=4: a token of this model has 3 experts"),
        capacity_aware(make("olmoe"), "oea", k0=4),
    ):
        pass


def test_decode_steps_alone_are_bounded() -> None:
    """The prompt is the stock model's, and a step's set is that of its four tokens."""
    model = make("olmoe")
    tokens = batch(n_sequences=4, n_positions=6)
    seen: list[torch.Tensor] = []
    experts = model.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(lambda _m, args: seen.append(args[1].clone()))
    with capacity_aware(model, "xshare", expert_budget=0.25, decode="only", verify=False) as meter:
        model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    handle.remove()
    assert len(active(seen[0])) > 2  # of the prompt
    assert [len(active(step)) for step in seen[1:]] == [2, 2, 2]
    summary = meter.summary()
    assert summary["decode"]["activated_after"] == summary["activated_after"] == 2
    assert summary["decode"]["activated_before"] > 2
    assert summary["decode"]["effective_gamma"] is None
