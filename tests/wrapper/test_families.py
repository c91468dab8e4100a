"""Every architecture: understood, equal to stock where it must be, changed where it must."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper.gates import GateRecipe
from capmoe_eval.wrapper.kernel import stock_experts
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.proof import KERNEL_TOLERANCE, _deviation
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.architectures import build, small_config
from tests.wrapper.models import PAPER_FAMILIES, ROUNDING, SUPPORTED, batch, make, similarities

RECIPES = {
    "olmoe": GateRecipe(),
    "olmoe_normalised": GateRecipe(normalises=True),
    "qwen2_moe": GateRecipe(),
    "qwen3_moe": GateRecipe(normalises=True),
    "deepseek_v2": GateRecipe(),
    "deepseek_v2_groups": GateRecipe(groups="max"),
    "mixtral": GateRecipe(normalises=True),
    "gpt_oss": GateRecipe(normalises=True),
    "glm4_moe": GateRecipe("sigmoid", normalises=True, biased="scores"),
    "deepseek_v3": GateRecipe("sigmoid", normalises=True, groups="top2", biased="scores"),
    "granitemoe": GateRecipe(normalises=True),
    "ernie4_5_moe": GateRecipe(normalises=True, biased="scores"),
}
N_LAYERS = {
    "qwen2_moe": 2,
    "qwen3_moe": 2,
    "deepseek_v2": 2,
    "glm4_moe": 1,
    "deepseek_v3": 1,
    "ernie4_5_moe": 1,
}


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor, **kwargs: Any) -> Tensor:
    return model(tokens, **kwargs).logits


def loop_over_pairs(experts: Any, hidden_TH: Tensor, index_TS: Tensor, weight_TS: Tensor) -> Tensor:
    """The experts' definition: the sum over kept pairs, one pair at a time."""
    eager = stock_experts(experts, "eager")
    out_TH = torch.zeros_like(hidden_TH)
    for t, row in enumerate(index_TS.tolist()):
        for s, expert in enumerate(row):
            if expert < experts.num_experts:
                one = slice(t, t + 1), slice(s, s + 1)
                out_TH[t] += eager(experts, hidden_TH[t : t + 1], index_TS[one], weight_TS[one])[0]
    return out_TH


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_router_is_understood(name: str) -> None:
    layers = find_moe_layers(make(name))
    assert len(layers) == N_LAYERS.get(name, 2)
    assert {layer.gate.recipe for layer in layers} == {RECIPES[name]}


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["baseline", "score", "order", "random", "token_reroute"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_without_a_binding_capacity_the_logits_are_the_stock_models(name: str, method: str) -> None:
    model = make(name)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1, 7:] = 0
    for gamma, kwargs in itertools.product((math.inf, 100.0), ({}, {"attention_mask": mask})):
        before = logits(model, batch(), **kwargs)
        with capacity_aware(model, method, gamma=gamma, verify=gamma == math.inf) as meter:
            inside = logits(model, batch(), **kwargs)
        assert torch.equal(before, inside), "of pads, too"
        assert meter.summary()["dropped"] == 0
        assert meter.proofs()["stock_at_infinity"]["passed"] is (
            True if gamma == math.inf else None
        )


# Those of MACS and LASER, which need other inputs, are in tests/extensions.
APART = ("baseline", "macs", "laser")


@pytest.mark.parametrize("method", [name for name in method_names() if name not in APART])
@pytest.mark.parametrize("name", PAPER_FAMILIES)
def test_every_method_changes_the_logits_and_restores_the_model(name: str, method: str) -> None:
    """The test that fails if the intervention does nothing."""
    model, tokens = make(name), batch()
    if method in ("oea", "xshare", "sere"):  # more tokens activate every expert of so small a model
        tokens = tokens[:1, :2]
    before = logits(model, tokens)
    knobs: dict[str, Any] = {"calibrated": similarities(model)} if method == "sere" else {}
    with capacity_aware(model, method, gamma=0.5, expert_budget=0.25, **knobs) as meter:
        inside = logits(model, tokens)
    assert not torch.allclose(before, inside, atol=1e-3)
    assert meter.summary()["dropped"] > 0
    proofs = meter.proofs()
    proofs.pop("best_kept", None)  # the k0 best of two tokens may exceed the budget
    if method == "expert_drop":  # no load has a bound
        assert proofs.pop("overload_drops")["passed"] is None
    assert all(proof["passed"] for proof in proofs.values())
    assert torch.equal(before, logits(model, tokens))


@pytest.mark.numeric
@pytest.mark.parametrize("stock", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_the_kernel_equals_the_loop_over_kept_pairs(name: str, stock: str) -> None:
    model = make(name, experts=stock)
    checked = 0

    def compare(experts: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        nonlocal checked
        given = list(args) + list(kwargs.values())
        expected = loop_over_pairs(experts, *given)
        assert _deviation(out, expected) <= KERNEL_TOLERANCE[torch.float32]
        checked += 1

    for knobs in (
        {"method": "score", "gamma": 0.7},
        {"method": "expanded_drop", "gamma": 1.0, "ep_size": 2},  # K widens
        {"method": "score", "gamma": 0.0},
    ):
        with capacity_aware(model, **knobs) as meter:
            handles = [
                layer.experts.register_forward_hook(compare, with_kwargs=True)
                for layer in meter.layers
            ]
            logits(model, batch(n_sequences=2, n_positions=6))
            for handle in handles:
                handle.remove()
    assert checked == 3 * len(meter.layers)


@pytest.mark.parametrize("name", SUPPORTED)
def test_half_precision_works(name: str) -> None:
    model = make(name).to(torch.bfloat16)
    before = logits(model, batch())
    with capacity_aware(model, "expanded_drop", gamma=1.0, ep_size=2) as meter:
        inside = logits(model, batch())
    assert inside.dtype == torch.bfloat16 and bool(inside.isfinite().all())
    assert not torch.equal(before, inside)
    assert meter.summary()["added"] > 0


@pytest.mark.numeric
@pytest.mark.parametrize("name", PAPER_FAMILIES)
def test_zero_gamma_leaves_the_residual_and_the_shared_experts(name: str) -> None:
    model = make(name)
    with capacity_aware(model, "score", gamma=0.0) as meter:
        silent = logits(model, batch())
    assert meter.summary()["lost_all"] == 4 * 12 * len(meter.layers)
    for layer in find_moe_layers(model):
        for parameter in layer.experts.parameters():
            parameter.data.zero_()
    torch.testing.assert_close(silent, logits(model, batch()), **ROUNDING)


def _refused(model: nn.Module) -> str:
    with pytest.raises(UsageError) as error, capacity_aware(model, "score", 1.0):
        pass
    return str(error.value)


def test_a_router_that_returns_more_is_refused_by_name() -> None:
    line = _refused(build("inkling"))
    assert "model=InklingForCausalLM: the router of model.layers.0.mlp is not understood" in line
    assert "InklingTopkRouter" in line and "(logits, weights, indices)" in line


def test_a_router_with_other_weights_is_refused_by_name() -> None:
    line = _refused(build("phimoe"))
    assert "PhimoeTopKRouter" in line and "neither softmax nor sigmoid" in line


def test_a_dense_model_is_refused() -> None:
    config = small_config(transformers.LlamaConfig, {})
    assert "no Mixture-of-Experts layer found" in _refused(transformers.LlamaForCausalLM(config))


@pytest.mark.numeric
def test_methods_agree_across_stock_kernels() -> None:
    """Which kernel a user has must not change what a method computes."""
    method = create_method("expanded_drop", gamma=1.0, ep_size=2)
    results = []
    for stock in ("eager", "grouped_mm"):
        model = make("olmoe", experts=stock)
        with capacity_aware(model, method):
            results.append(logits(model, batch()))
    torch.testing.assert_close(results[0], results[1], **ROUNDING)
