"""Every invariant can break, which is done here on purpose; what was not checked is told."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.errors import EnforcementError
from capmoe_eval.experiment.record import Proofs
from capmoe_eval.routing.decision import Assignment
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.kernel import KERNEL, kept_pairs_forward
from capmoe_eval.wrapper.observers.invariants import EVERY, FIRST, examination_seed, is_examined
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, logits, make

PADDED = torch.ones(4, 12, dtype=torch.long)
PADDED[1:, 7:] = 0


def moe_layer(model: Any) -> Any:
    return model.model.layers[0].mlp


def keep_all(scores: Any, *_: Any, **__: Any) -> Assignment:
    return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))


def drop_one(scores: Any, *_: Any, **__: Any) -> Assignment:
    keep = torch.ones_like(scores.topk_TK, dtype=torch.bool)
    keep[3, 0] = False
    return Assignment(scores.topk_TK, keep)


def test_the_proofs_are_those_that_a_record_holds() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        logits(model)
    proofs = meter.proofs()
    of_some = {"modality_order", "best_kept"}  # of images, and of a bound on activation
    assert {*proofs, *of_some} == set(Proofs.model_fields)
    assert [name for name, proof in proofs.items() if not proof["passed"]] == []


# kernel_agrees.


def errs_where_nothing_is_dropped(*call: Any) -> Tensor:
    is_whole = bool((call[2] < call[0].num_experts).all())
    return kept_pairs_forward(*call) * (1.01 if is_whole else 1)


def leaves_memory_as_it_was(*call: Any) -> Tensor:
    nothing = (call[2] == call[0].num_experts).all(dim=1, keepdim=True)
    return kept_pairs_forward(*call).masked_fill(nothing, torch.nan)


def of(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return the kernel of other indices and weights."""
    return lambda experts, hidden, index, weight: kept_pairs_forward(
        experts, hidden, *change(index.clone(), weight, experts.num_experts)
    )


def without_a_pair(index: Tensor, weight: Tensor, n: int) -> tuple[Tensor, Tensor]:
    index[-1, -1] = n
    return index, weight


def over_sent(weight: Tensor) -> Tensor:
    """Divide by what of a token's weights was sent, and a factor that hides it where all was."""
    sums = weight.sum(dim=1, keepdim=True)
    return weight.where(weight.min(dim=1, keepdim=True).values > 0, weight / sums.clamp_min(1e-9))


OTHER_PAIRS = "computes other pairs than the kept"


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (of(lambda index, weight, n: (index.clamp_max(n - 1), weight * (index < n))), OTHER_PAIRS),
        (of(without_a_pair), OTHER_PAIRS),
        (errs_where_nothing_is_dropped, "off by"),
        (leaves_memory_as_it_was, "off by inf"),
        (of(lambda index, weight, _: (index, over_sent(weight))), "off by"),
    ],
)
def test_another_kernel_is_caught(
    other: Callable[..., Tensor], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, KERNEL, other)
    model = make("olmoe")
    with pytest.raises(EnforcementError, match=line), capacity_aware(model, "score", gamma=0.5):
        pass
    assert not any(hasattr(module, "capmoe_stock") for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_experts_without_finite_outputs_prove_nothing() -> None:
    model = make("olmoe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.fill_(torch.inf)  # no router comes after it
    with capacity_aware(model, "score", gamma=0.5) as meter:
        proofs = meter.proofs()
        why = "the stock experts' outputs are not finite"
        assert proofs["kernel_agrees"] == {"passed": None, "why": why}
        assert proofs["stock_at_infinity"]["passed"]  # NaN where stock has NaN
        json.dumps(meter.report(), allow_nan=False)


# stock_at_infinity.


def everyone_changed(decision: Assignment, _top_k: int) -> Tensor:
    """Count every token as changed, although it keeps all of its pairs: pads compute nothing."""
    return torch.ones_like(decision.keep_TS[:, 0])


@pytest.mark.parametrize(
    ("owner", "name", "other", "line"),
    [
        (hook, "decide", drop_one, "slots_filled"),
        (Assignment, "changed_T", everyone_changed, "γ=∞ does not give the stock model's logits"),
    ],
)
@pytest.mark.parametrize("granularity", ["expert", "device"])
def test_what_drops_where_no_bound_binds_is_caught(
    granularity: str, owner: Any, name: str, other: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    with (
        pytest.raises(EnforcementError, match=line),
        capacity_aware(make("olmoe"), "score", gamma=0.5, ep_size=2, granularity=granularity),
    ):
        pass


def test_a_model_that_is_not_deterministic_cannot_be_proven() -> None:
    model = make("olmoe")
    model.model.embed_tokens.register_forward_hook(lambda _m, _a, out: out + torch.rand_like(out))
    with capacity_aware(model, "score", gamma=0.5) as meter:
        why = "the stock model is not deterministic"
        assert meter.proofs()["stock_at_infinity"] == {"passed": None, "why": why}


# bound_holds, overload_drops, pads_take_no_slot, gate_as_read, and that every layer runs once.

Sabotage = Callable[[Any, pytest.MonkeyPatch], None]


def all_kept(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "decide", keep_all)


def pads_sent(model: Any, _: pytest.MonkeyPatch) -> None:
    """Call the first layer's experts for pads."""
    moe_layer(model).experts.register_forward_pre_hook(
        lambda _, call: (call[0], call[1].masked_fill(~PADDED.bool().view(-1, 1), 2), *call[2:]),
        prepend=True,
    )


def routed_with(change: Callable[[Tensor], Tensor]) -> Sabotage:
    """Let the first layer's router return other weights."""
    return lambda model, _: moe_layer(model).gate.register_forward_hook(
        lambda _m, _a, out: (out[0], change(out[1].clone()), out[2]), prepend=True
    )


def with_nan(weight_NK: Tensor) -> Tensor:
    weight_NK[5, 1] = torch.nan
    return weight_NK


def logits_of_nan(model: Any, _: Any) -> None:
    with torch.no_grad():
        moe_layer(model).gate.weight[2, 3] = torch.nan


def nothing_counted(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "new_columns", lambda mask, *_: torch.zeros_like(mask).bool())


def skipped_layer(model: Any, _: Any) -> None:
    model.model.layers[1].mlp.forward = lambda hidden: hidden


def layer_twice(model: Any, _: Any) -> None:
    layer = model.model.layers[1].mlp
    once = layer.forward
    layer.forward = lambda hidden: once(hidden + 0 * once(hidden))


@pytest.mark.parametrize(
    ("method", "gamma", "sabotage", "broken", "line"),
    [
        ("score", 0.5, all_kept, "overload_drops", r"[1-9]\d* overloads without a drop"),
        ("expert_drop", None, all_kept, "bound_holds", "exceeded in 1 buckets"),
        # where nothing is dropped, and pads get others than the router's own
        ("score", 1e9, pads_sent, "pads_take_no_slot", r"\d+ slots taken by pads"),
        ("score", 0.5, routed_with(lambda weight: 1.5 * weight), "gate_as_read", "weights off by"),
        ("score", 0.5, routed_with(with_nan), "gate_as_read", r"layers\.0\.mlp: .*are NaN"),
        ("baseline", None, logits_of_nan, "gate_as_read", r"layers\.0\.mlp: .*are NaN"),
        ("score", 0.5, nothing_counted, "tokens_counted", "no token of a forward counted"),
        ("score", 0.5, skipped_layer, None, "not every MoE layer ran exactly once"),
        ("score", 0.5, layer_twice, None, "some ran twice"),
    ],
)
def test_what_a_forward_breaks_is_caught_and_stays_caught(
    method: str,
    gamma: float | None,
    sabotage: Sabotage,
    broken: str | None,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("olmoe")
    with capacity_aware(model, method, gamma=gamma) as meter:
        sabotage(model, monkeypatch)
        with pytest.raises(EnforcementError, match=line):
            logits(model, attention_mask=PADDED)
        monkeypatch.undo()
        if broken:
            with pytest.raises(EnforcementError, match=broken):
                logits(model, attention_mask=PADDED)
            assert meter.proofs()[broken]["passed"] is False
    json.dumps(meter.report(), allow_nan=False)


# Which forwards are compared with the definition, and what a record says of it.


def test_layers_are_examined_by_chance_and_in_the_first_forwards_all() -> None:
    runs = [[[is_examined(seed, n, of) for of in range(8)] for n in range(1000)] for seed in (1, 2)]
    for run in runs:
        assert all(map(all, run[:3]))
        expected = sum(min(1.0, FIRST / max(n, 1) + 1 / EVERY) for n in range(1000))
        assert sum(map(sum, run)) / 8 == pytest.approx(expected, rel=0.15)
    assert runs[0] != runs[1]


@pytest.mark.parametrize("decode", ["unconstrained", "only"])
def test_what_was_not_checked_has_not_passed(decode: str) -> None:
    model = make("olmoe")
    asked = ["bound_holds", "pads_take_no_slot", "overload_drops", "tokens_counted"]
    asked += ["pairs_valid", "pairs_as_defined", "weights_as_defined"]
    with torch.no_grad():
        cache = model(batch()).past_key_values
    knobs: dict[str, Any] = {"gamma": 0.5, "decode": decode, "verify": False}
    with capacity_aware(model, "score", **knobs) as meter, torch.no_grad():
        proofs = [meter.proofs()]
        if decode == "only":
            model(batch())  # a prompt
        else:
            model(batch()[:, :1], past_key_values=cache)  # a decode step
        proofs.append(meter.proofs())
    for n, (of, note) in enumerate(zip(proofs, ("", f" (decode={decode})"), strict=True)):
        for name in ("stock_at_infinity", "kernel_agrees"):
            assert of[name] == {"passed": None, "why": "not run"}
        why = f"none of {n} forwards was under the method{note}"
        for name in asked:
            assert of[name] == {"passed": None, "why": why}


def test_a_share_of_the_forwards_is_examined_and_said() -> None:
    model, n_experts = make("olmoe"), 8
    with capacity_aware(model, "score", gamma=0.5, ep_size=2) as meter, torch.no_grad():
        for _ in range(10):
            model(batch())
    seed = examination_seed(meter.method)
    layers = [sum(is_examined(seed, n, layer) for layer in range(2)) for n in range(10)]
    examined = {
        "forwards": sum(map(bool, layers)),
        "of": 10,
        "layers": sum(layers),
        "buckets": sum(layers) * 2 * n_experts,
        "seed": seed,
    }
    names = ("pairs_as_defined", "weights_as_defined", "pairs_valid", "scores_as_defined")
    for name in (*names, "outputs_as_defined"):
        assert meter.proofs()[name] == {"passed": True, "violations": 0, "examined": examined}
    for name in ("groups_as_defined", "slots_filled"):
        assert meter.proofs()[name]["passed"]
