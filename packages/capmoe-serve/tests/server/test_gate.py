"""The gates of vLLM's routers are read from what the routers return, in their precision."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.routing.methods.token_drop import TokenDrop
from hypothesis import example, given
from hypothesis import strategies as st

from capmoe_serve.server.gate import read_gate, slack
from server.engines import NEEDS_VLLM, engine, make, prompts


def of_vllm(test: Any) -> Any:
    """Mark a test that asks vLLM."""
    return NEEDS_VLLM(pytest.mark.slow(test))


GROUPS = {"num_expert_group": 4, "topk_group": 2}
BIAS = torch.linspace(-0.5, 0.5, 16)


ROUTERS = {"cpu_router": "CPURouter", "grouped_topk_router": "GroupedTopKRouter"}


def router_of(module: str, **settings: Any) -> Any:
    """Return a router of vLLM with 16 experts, of which it chooses 4."""
    library = importlib.import_module(f"vllm.model_executor.layers.fused_moe.router.{module}")
    return getattr(library, ROUTERS[module])(4, 16, **settings)


@of_vllm
@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_groups_biases_and_scales_are_read(
    kind: str, renormalize: bool, scoring_func: str, bias: torch.Tensor | None, scale: float
) -> None:
    grouped = {"use_grouped_topk": True} if kind == "cpu_router" else {}
    router = router_of(
        kind,
        renormalize=renormalize,
        scoring_func=scoring_func,
        routed_scaling_factor=scale,
        e_score_correction_bias=bias,
        **GROUPS,
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


# The precision of the logits.


@example(seed=81, spread=0.1, n_experts=83)  # above the bound of a log Z that is rounded once
@given(seed=st.integers(0, 2**31), spread=st.floats(0.1, 20), n_experts=st.integers(2, 128))
def test_the_slack_covers_the_rounding(seed: int, spread: float, n_experts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_TE = (torch.randn(32, n_experts, generator=generator) * spread).bfloat16()
    topk_TK = logits_TE.topk(2).indices
    exact_TK = logits_TE.double().softmax(dim=-1).gather(1, topk_TK)
    # As vLLM's router computes them on a CPU, in the precision of the logits.
    log_z_T1 = logits_TE.logsumexp(dim=-1, keepdim=True)
    weight_TK = (logits_TE.gather(1, topk_TK) - log_z_T1).exp()
    off_TK = (weight_TK.double() - exact_TK).abs() / exact_TK
    assert float(off_TK.amax()) <= float(slack(logits_TE))


@of_vllm
def test_an_engine_in_bfloat16_is_put_under_a_capacity(tmp_path: Path) -> None:
    """Router logits are large, so that what vLLM rounds is more than its weights show."""
    model = make("olmoe")
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(200)
    model.save_pretrained(tmp_path)
    texts = prompts(16, 24, 40)
    with engine(tmp_path, TokenDrop(gamma=1.0), dtype="bfloat16") as served:
        served.generate(texts)
        report = served.report()
    assert report["proofs"]["gate_as_read"]["passed"]
    assert report["proofs"]["kernel_agrees"]["passed"]
    assert report["summary"]["dropped"]
    deviations = [layer["weight_deviation"] for layer in report["layers"]]
    assert max(deviations) > 1e-3  # float32 would explain a tenth of that
