"""Every promise can break: what breaks it is done here on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment
from capmoe_eval.wrapper import hook, plan, proof
from capmoe_eval.wrapper.kernel import KERNEL, kept_pairs_forward
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import PAPER_FAMILIES, batch, make

Kernel = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def run(model: nn.Module, **call: Any) -> Tensor:
    return model(batch(), **call).logits


def padded_mask() -> Tensor:
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1:, 7:] = 0
    return mask


def moe_layer(model: Any) -> Any:
    return model.model.layers[0].mlp


def keep_all(scores: Any, *_: Any, **__: Any) -> Assignment:
    return Assignment(scores.topk_TK, torch.ones_like(scores.topk_TK, dtype=torch.bool))


def test_the_promises_are_those_that_a_record_holds() -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        run(model)
    proofs = meter.proofs()
    of_some = {"modality_order", "best_kept"}  # of images, and of a bound on activation
    assert {*proofs, *of_some} == set(Proofs.model_fields)
    assert all(promise["passed"] for promise in proofs.values())


def test_a_promise_that_does_not_apply_says_why() -> None:
    for method in (create_method("baseline"), create_method("score", 1.0, count_padding=True)):
        model = make("olmoe")
        with capacity_aware(model, method) as meter:
            run(model)
        promise = meter.proofs()["pads_take_no_slot"]
        assert promise["passed"] is None
        assert promise["why"]


# kernel_agrees.


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*PAPER_FAMILIES, "gpt_oss"])
def test_the_kernel_agrees_with_every_stock_kernel(name: str, dtype: torch.dtype) -> None:
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model = make(name, experts=implementation).to(dtype)
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if "router" in part or part.endswith("gate.weight"):
                    parameter.mul_(0.3)  # no weight too small for half precision
        with capacity_aware(model, "score", gamma=1.0) as meter:
            promise = meter.proofs()["kernel_agrees"]
        n_layers, n_tokens, hidden = len(meter.layers), 16, 32
        assert promise["passed"]
        assert promise["compared"] == 2 * n_layers * n_tokens * hidden
        assert promise["deviation"] <= promise["tolerance"] == proof.KERNEL_TOLERANCE[dtype]


def computes_the_dropped(experts: Any, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return kept_pairs_forward(experts, hidden, index.clamp_max(experts.num_experts - 1), weight)


def weighs_the_dropped_by_zero(
    experts: Any, hidden: Tensor, index: Tensor, weight: Tensor
) -> Tensor:
    kept = index < experts.num_experts
    return kept_pairs_forward(
        experts, hidden, index.clamp_max(experts.num_experts - 1), weight * kept
    )


def loses_a_pair(experts: Any, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    index = index.clone()
    index[-1, -1] = experts.num_experts
    return kept_pairs_forward(experts, hidden, index, weight)


def ignores_the_weights(experts: Any, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return kept_pairs_forward(experts, hidden, index, torch.ones_like(weight))


def errs_where_nothing_is_dropped(
    experts: Any, hidden: Tensor, index: Tensor, weight: Tensor
) -> Tensor:
    out = kept_pairs_forward(experts, hidden, index, weight)
    return 1.01 * out if bool((index < experts.num_experts).all()) else out


def leaves_memory_as_it_was(experts: Any, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    out = kept_pairs_forward(experts, hidden, index, weight)
    return out.masked_fill((index == experts.num_experts).all(dim=1, keepdim=True), torch.nan)


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (computes_the_dropped, "computes other pairs than the kept"),
        (weighs_the_dropped_by_zero, "computes other pairs than the kept"),
        (loses_a_pair, "computes other pairs than the kept"),
        (ignores_the_weights, "off by"),
        (errs_where_nothing_is_dropped, "off by"),
        (leaves_memory_as_it_was, "off by inf"),
    ],
)
def test_another_kernel_is_caught(
    kernel: Kernel, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, KERNEL, kernel)
    model = make("olmoe")
    with pytest.raises(EnforcementError, match=line), capacity_aware(model, "score", gamma=0.5):
        pass
    assert not any(hasattr(module, "capmoe_stock") for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_kernel_is_proven_once_while_the_weights_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparisons: list[int] = []
    compare = proof._compare_kernels

    def counting(*args: Any) -> dict[str, Any]:
        comparisons.append(1)
        return compare(*args)

    monkeypatch.setattr(proof, "_compare_kernels", counting)
    model = make("olmoe")

    def enter() -> int:
        for gamma in (0.5, 1.0):
            with capacity_aware(model, "score", gamma=gamma) as meter:
                assert meter.proofs()["kernel_agrees"]["passed"]
        return len(comparisons)

    assert enter() == 1
    with torch.no_grad():
        moe_layer(model).experts.down_proj.mul_(2.0)
    assert enter() == 2
    model.set_experts_implementation("eager")
    assert enter() == 3


def test_experts_without_finite_outputs_prove_nothing() -> None:
    model = make("olmoe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.fill_(torch.inf)  # no router comes after it
    with capacity_aware(model, "score", gamma=0.5) as meter:
        assert meter.proofs()["kernel_agrees"] == {
            "passed": None,
            "why": "the stock experts' outputs are not finite",
        }
        assert meter.proofs()["stock_at_infinity"]["passed"]  # NaN where stock has NaN
        json.dumps(meter.report(), allow_nan=False)


# stock_at_infinity.


@pytest.mark.parametrize(
    "knobs", [{}, *({"ep_size": 2, "granularity": level} for level in ("expert", "device"))]
)
def test_a_decision_that_drops_where_no_bound_binds_is_caught(
    knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_one(scores: Any, *_: Any, **__: Any) -> Assignment:
        keep = torch.ones_like(scores.topk_TK, dtype=torch.bool)
        keep[3, 0] = False
        return Assignment(scores.topk_TK, keep)

    monkeypatch.setattr(hook, "decide", drop_one)
    with (
        pytest.raises(EnforcementError, match="γ=∞ does not give the stock model's logits"),
        capacity_aware(make("olmoe"), "score", gamma=0.5, **knobs),
    ):
        pass


def test_a_bound_that_never_binds_and_touches_pads_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every token counts as changed, although it keeps all of its pairs: pads compute nothing."""
    everyone = lambda decision, _: torch.ones_like(decision.keep_TS[:, 0])  # noqa: E731
    monkeypatch.setattr(Assignment, "changed_T", everyone)
    with (
        pytest.raises(EnforcementError, match="γ=∞ does not give the stock model's logits"),
        capacity_aware(make("olmoe"), "score", gamma=0.5),
    ):
        pass


def test_a_model_that_is_not_deterministic_cannot_be_proven() -> None:
    model = make("olmoe")
    handle = model.model.embed_tokens.register_forward_hook(
        lambda _m, _a, out: out + torch.rand_like(out)
    )
    with capacity_aware(model, "score", gamma=0.5) as meter:
        pass
    handle.remove()
    assert meter.proofs()["stock_at_infinity"] == {
        "passed": None,
        "why": "the stock model is not deterministic",
    }


def test_nothing_is_proven_on_entry_unless_asked() -> None:
    with capacity_aware(make("olmoe"), "score", gamma=0.5, verify=False) as meter:
        pass
    for name in ("stock_at_infinity", "kernel_agrees"):
        assert meter.proofs()[name] == {"passed": None, "why": "not run"}


# pads_take_no_slot.


def test_pads_that_are_computed_are_caught() -> None:
    """Both where real tokens lose pairs, and where pads get others than the router's own."""
    for gamma, n_slots in ((0.5, "45"), (1e9, r"\d+")):
        model = make("olmoe")
        with capacity_aware(model, "score", gamma=gamma) as meter:
            pads = ~padded_mask().bool().view(-1, 1)
            moe_layer(model).experts.register_forward_pre_hook(
                lambda _m, args, pads=pads: (args[0], args[1].masked_fill(pads, 2), *args[2:]),
                prepend=True,
            )
            with pytest.raises(EnforcementError, match=f"{n_slots} slots taken by pads"):
                run(model, attention_mask=padded_mask())
        assert meter.proofs()["pads_take_no_slot"]["passed"] is False


def test_pads_are_known_from_the_mask_not_from_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pads reach the experts if the rows are not filtered."""
    group_tokens = plan.group_tokens

    def everyone(counted: Tensor, **knobs: Any) -> Any:
        return group_tokens(torch.ones_like(counted), **knobs)

    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5):
        monkeypatch.setattr(plan, "group_tokens", everyone)
        with pytest.raises(EnforcementError, match=r"\d+ slots taken by pads"):
            run(model, attention_mask=padded_mask())


# overload_drops, bound_holds, every_layer_hooked.


def test_an_overload_in_which_nothing_is_dropped_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter:
        monkeypatch.setattr(hook, "decide", keep_all)
        with pytest.raises(EnforcementError, match=r"[1-9]\d* overloads without a drop"):
            run(model)
    assert meter.proofs()["overload_drops"]["passed"] is False


def test_an_expert_drop_that_silences_nobody_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("olmoe")
    with capacity_aware(model, "expert_drop") as meter:
        monkeypatch.setattr(hook, "decide", keep_all)
        with pytest.raises(EnforcementError, match="bound exceeded in 1 buckets"):
            run(model)
    assert meter.proofs()["bound_holds"]["passed"] is False


def test_an_expert_drop_that_silences_another_expert_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silence_the_busiest(scores: Any, *_: Any, **__: Any) -> Assignment:
        busiest = scores.topk_TK.flatten().bincount().argmax()
        return Assignment(scores.topk_TK, scores.topk_TK != busiest)

    model = make("olmoe")
    with capacity_aware(model, "expert_drop"):
        monkeypatch.setattr(hook, "decide", silence_the_busiest)
        with pytest.raises(EnforcementError, match="bound exceeded in 1 buckets"):
            run(model)


def test_a_layer_that_was_not_found_is_missed() -> None:
    model = make("olmoe")
    model.config.num_hidden_layers = 3
    with (
        pytest.raises(UsageError, match="announces 3 MoE layers, 2 were found"),
        capacity_aware(model, "score", gamma=0.5),
    ):
        pass


# Weights.


def nan_weight(_router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = output[1].clone()
    weights[5, 1] = torch.nan
    return output[0], weights, output[2]


@pytest.mark.parametrize("method", ["score", "baseline"])
def test_a_weight_that_is_no_number_is_caught_and_stays_caught(method: str) -> None:
    model = make("olmoe")
    with capacity_aware(model, method, gamma=0.5) as meter:
        handle = moe_layer(model).gate.register_forward_hook(nan_weight, prepend=True)
        with pytest.raises(EnforcementError, match=r"layers\.0\.mlp: .*weights are NaN"):
            run(model)
        handle.remove()
        with pytest.raises(EnforcementError, match="weights are NaN"):
            run(model)
    report = json.loads(json.dumps(meter.report(), allow_nan=False))
    assert report["layers"][0]["weight_deviation"] is None


def test_logits_that_are_no_numbers_leave_a_valid_report() -> None:
    model = make("olmoe")
    with capacity_aware(model, "baseline") as meter:
        with torch.no_grad():
            moe_layer(model).gate.weight[2, 3] = torch.nan
        with pytest.raises(EnforcementError, match="weights are NaN"):
            run(model)
    report = json.loads(json.dumps(meter.report(), allow_nan=False))
    assert None in report["layers"][0]["score_by_rank"]


def test_kept_weights_are_the_routers_own_and_not_computed_again() -> None:
    """Within the tolerance a router's weights may differ from its scores: they are the ones."""
    model = make("olmoe")
    given: list[tuple[Tensor, Tensor]] = []
    own: list[Tensor] = []

    def nudge(_m: nn.Module, _a: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own.append(output[1] * (1 + 3e-5))
        return output[0], own[-1], output[2]

    with capacity_aware(model, "expanded_drop", gamma=0.7, ep_size=2):
        moe_layer(model).gate.register_forward_hook(nudge, prepend=True)
        moe_layer(model).experts.register_forward_pre_hook(
            lambda _m, args: given.append((args[1].clone(), args[2].clone()))
        )
        run(model)
    index, weights = given[0]
    kept = index[:, :3] < 8
    assert torch.equal(weights[:, :3][kept], own[0][kept])
