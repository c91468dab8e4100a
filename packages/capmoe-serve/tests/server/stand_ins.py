"""A model with the parts of vLLM that the plugin takes over, and steps of it under a method."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from torch import Tensor, nn

from capmoe_serve.server.engine import EngineCapacity, StepRows

E, K, HIDDEN = 7, 3, 6
MIXED = StepRows(("a", "b", "c"), (9, 1, 4), (0, 12, 3), (9, 8, 7))
"""A prompt, a token that was generated, and the last chunk of a prompt."""


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
            output=output_NH, hidden_states=hidden_NH, topk_weights=weight_NK, topk_ids=index_NK
        )
        return output_NH, weight_NK, index_NK


class Model(nn.Module):
    """MoE layers and nothing else."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers, self.announced = nn.ModuleList(layers), len(layers)

    @property
    def config(self) -> Any:
        config = SimpleNamespace(num_hidden_layers=self.announced)
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


class LayerCall(NamedTuple):
    """What a layer was given and returned in a step; rows of padding come last."""

    hidden_NH: Tensor
    logits_NE: Tensor
    output_NH: Tensor
    weight_NS: Tensor
    index_NS: Tensor

    @property
    def pairs(self) -> list[set[int]]:
        """The experts of every row that weigh something at the kernel."""
        rows = zip(self.index_NS.tolist(), self.weight_NS.tolist(), strict=True)
        return [{e for e, w in zip(*row, strict=True) if w} for row in rows]

    @property
    def chosen(self) -> list[set[int]]:
        """The experts of every row by the router."""
        return [set(row) for row in self.logits_NE.topk(K).indices.tolist()]


class Served:
    """MoE layers under a method; the logits of their steps are random, and overload expert 0."""

    def __init__(
        self,
        method: str | Method,
        gamma: float | str | None = None,
        *,
        layers: int = 2,
        kind: type[Experts] = CPUUnquantizedExperts,
        normalises: bool = False,
        samples: bool = False,
        draw: int = 0,
        **knobs: Any,
    ) -> None:
        self.method = create_method(method, gamma, **knobs) if isinstance(method, str) else method
        self.layers = [Layer(Router(E, K, normalises=normalises), kind(E)) for _ in range(layers)]
        model = Model(*self.layers)
        self.capacity = EngineCapacity(model, model.config, self.method, samples=samples)
        self._generator = torch.Generator().manual_seed(draw)

    @property
    def experts(self) -> Any:
        """The kernel of the first layer."""
        return self.layers[0]._quant_method.moe_kernel.fused_experts

    def compute(
        self, rows: StepRows | int = 16, *, padding: int = 0, layers: int | None = None
    ) -> list[LayerCall]:
        """Compute a step, by default of one prompt; one that not all layers run is broken off."""
        if isinstance(rows, int):
            rows = StepRows(("a",), (rows,), (0,), (rows,))
        self.capacity.begin(*runner_of(rows))
        calls = []
        for layer in self.layers[:layers]:
            hidden_NH, logits_NE = (
                torch.randn(rows.n_rows + padding, size, generator=self._generator)
                for size in (HIDDEN, E)
            )
            logits_NE[:, 0] += 2
            calls.append(LayerCall(hidden_NH, logits_NE, *layer(hidden_NH, logits_NE)))
        if len(calls) < len(self.layers):
            self.capacity.abandon()
        else:
            self.capacity.end()
        return calls
