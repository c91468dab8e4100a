"""A router of vLLM that computes in the precision of its logits is not taken for a misread one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from capmoe_eval.routing.methods.token_drop import TokenDrop
from hypothesis import example, given
from hypothesis import strategies as st

from capmoe_serve.server.gate import slack
from server.engines import NEEDS_VLLM, engine, make, prompts


def weights(logits_TE: torch.Tensor, topk_TK: torch.Tensor) -> torch.Tensor:
    """Return the weights of vLLM's router on a CPU, in the precision of the logits."""
    log_z_T1 = logits_TE.logsumexp(dim=-1, keepdim=True)
    return (logits_TE.gather(1, topk_TK) - log_z_T1).exp().float()


@example(seed=81, spread=0.1, n_experts=83)  # above the bound of a log Z that is rounded once
@given(seed=st.integers(0, 2**31), spread=st.floats(0.1, 20), n_experts=st.integers(2, 128))
def test_the_slack_covers_the_rounding(seed: int, spread: float, n_experts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_TE = (torch.randn(32, n_experts, generator=generator) * spread).bfloat16()
    topk_TK = logits_TE.topk(2).indices
    exact_TK = logits_TE.double().softmax(dim=-1).gather(1, topk_TK)
    off_TK = (weights(logits_TE, topk_TK).double() - exact_TK).abs() / exact_TK
    assert float(off_TK.amax()) <= float(slack(logits_TE))


@NEEDS_VLLM
@pytest.mark.slow
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
    assert [of for of in report["proofs"].values() if of["passed"] is False] == []
    assert report["proofs"]["gate_as_read"]["passed"]
    assert report["proofs"]["kernel_agrees"]["passed"]
    assert report["summary"]["dropped"]
    deviations = [layer["weight_deviation"] for layer in report["layers"]]
    assert max(deviations) > 1e-3  # float32 would explain a tenth of that
