"""The gates of vLLM's routers are read from what the routers return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError

from capmoe_serve.server.gate import read_gate
from server.engines import NEEDS_VLLM

pytestmark = [NEEDS_VLLM, pytest.mark.slow]

GROUPS = {"num_expert_group": 4, "topk_group": 2}
BIAS = torch.linspace(-0.5, 0.5, 16)


def cpu_router(**settings: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    return CPURouter(4, 16, **settings)


def grouped_router(**settings: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    return GroupedTopKRouter(4, 16, **GROUPS, **settings)


@pytest.mark.parametrize("make_router", [cpu_router, grouped_router])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_groups_biases_and_scales_are_read(
    make_router: Any, renormalize: bool, scoring_func: str, bias: torch.Tensor | None, scale: float
) -> None:
    grouped = {"use_grouped_topk": True, **GROUPS} if make_router is cpu_router else {}
    router = make_router(
        renormalize=renormalize,
        scoring_func=scoring_func,
        routed_scaling_factor=scale,
        e_score_correction_bias=bias,
        **grouped,
    )
    gate = read_gate("layer", router)
    recipe = gate.recipe
    assert (recipe.activation, recipe.normalises) == (scoring_func, renormalize)
    assert recipe.groups == ("max" if bias is None else "top2")
    assert recipe.biased == ("none" if bias is None else "scores")
    assert gate.scale == pytest.approx(scale)
    assert router.e_score_correction_bias is bias  # the random one is taken back
    generator = torch.Generator().manual_seed(1)
    logits_TE = torch.randn(32, 16, generator=generator)
    weight_TK, topk_TK = router._compute_routing(logits_TE, logits_TE, None)
    faults = gate.faults(gate.scores(logits_TE, topk_TK.long()), weight_TK)
    assert faults[1] <= 1
    assert faults[2] == 0


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_softmax_without_groups_is_read(renormalize: bool) -> None:
    gate = read_gate("layer", cpu_router(renormalize=renormalize))
    assert (gate.recipe.groups, gate.recipe.normalises) == ("none", renormalize)


def test_a_routing_function_of_a_model_s_own_is_refused() -> None:
    def squared(gating_output: torch.Tensor, topk: int, **_: Any) -> Any:
        return gating_output.softmax(dim=-1).square().topk(topk, dim=-1)

    with pytest.raises(UsageError) as caught:
        read_gate("model=Mine: layer 0", cpu_router(custom_routing_function=squared))
    line = "model=Mine: layer 0: no known gate computes the weights of its router CPURouter"
    assert str(caught.value).startswith(line)
