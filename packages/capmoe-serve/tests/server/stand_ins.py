"""A model with the parts of vLLM that the plugin takes over, and a runner of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from capmoe_serve.server.step import StepRows

HIDDEN = 6


class Router:
    """Chooses the K highest of a softmax, as vLLM's does."""

    def __init__(self, n_experts: int, top_k: int, *, normalises: bool = False) -> None:
        self.global_num_experts, self.top_k, self._normalises = n_experts, top_k, normalises
        self.eplb_state = None

    def _compute_routing(self, _hidden: Tensor, logits_TE: Tensor, _type: Any) -> Any:
        weight_TK, index_TK = logits_TE.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self._normalises:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        return weight_TK, index_TK.to(torch.int32)

    def _select_experts(self, hidden: Tensor, logits_TE: Tensor, kind: Any = None) -> Any:
        return self._compute_routing(hidden, logits_TE, kind)


class Experts:
    """Multiplies a token by a number of each expert; it computes row by row, and dropped pairs."""

    def __init__(self, n_experts: int) -> None:
        self.factor_E = torch.arange(1.0, n_experts + 1)
        self.pairs = 0  # that were computed so far

    def apply(
        self,
        *,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        **_: Any,
    ) -> None:
        assert topk_weights.dtype == torch.float32
        assert topk_ids.dtype == torch.int32
        assert topk_weights.is_contiguous()
        assert topk_ids.is_contiguous()
        assert bool(((topk_ids >= 0) & (topk_ids < len(self.factor_E))).all())
        self.pairs += topk_ids.numel()
        factor_N = (topk_weights * self.factor_E[topk_ids.long()]).sum(dim=1, keepdim=True)
        output.copy_(hidden_states * factor_N)


class CPUUnquantizedExperts(Experts):
    """Has the name of the kernel that may be given single pairs."""


class Layer(nn.Module):
    """An MoE layer."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router, self.routed_experts = router, nn.Identity()
        self._quant_method = SimpleNamespace(
            is_monolithic=False, moe_kernel=SimpleNamespace(fused_experts=experts)
        )

    def forward(self, hidden_NH: Tensor, logits_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the weights and experts that the kernel is called with."""
        weight_NK, index_NK = self.router._select_experts(hidden_NH, logits_NE)
        output_NH = torch.full_like(hidden_NH, torch.nan)
        self._quant_method.moe_kernel.fused_experts.apply(
            output=output_NH,
            hidden_states=hidden_NH,
            topk_weights=weight_NK,
            topk_ids=index_NK,
        )
        return output_NH, weight_NK, index_NK


class Model(nn.Module):
    """MoE layers and nothing else."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def config(self) -> Any:
        config = SimpleNamespace(num_hidden_layers=len(self.layers))
        return SimpleNamespace(get_text_config=lambda: config)


def runner_of(rows: StepRows) -> tuple[Any, Any]:
    """Return a model runner and the scheduler's output of a step."""
    batch = SimpleNamespace(
        num_reqs=len(rows.requests),
        req_ids=list(rows.requests),
        num_computed_tokens_cpu=np.array(rows.computed),
        num_prompt_tokens=np.array(rows.prompt),
    )
    tokens = dict(zip(rows.requests, rows.scheduled, strict=True))
    return SimpleNamespace(input_batch=batch), SimpleNamespace(num_scheduled_tokens=tokens)
