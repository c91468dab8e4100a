"""Tiny random models of many architectures, made on the spot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from capmoe_eval.wrapper.layers import find_moe_layers, is_experts
from capmoe_eval.wrapper.meter import Meter
from tests.wrapper.architectures import VOCABULARY, build

_SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 2}
MLA: dict[str, Any] = {"q_lora_rank": None, "num_key_value_heads": 4}
_K3 = {"num_experts_per_tok": 3}
_E4 = {"num_local_experts": 4}

PAPER_FAMILIES = ("olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "mixtral")
"""The families of the paper's models."""

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", _K3),
    "olmoe_normalised": ("olmoe", {**_K3, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 6, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_K3, "norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **(MLA | _K3),
            "topk_method": "greedy",
            "routed_scaling_factor": 1.7,
            "num_hidden_layers": 3,
        },
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {
            **(MLA | _K3),
            "first_k_dense_replace": 0,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    "mixtral": ("mixtral", _E4),
    "gpt_oss": ("gpt_oss", {**_E4, "sliding_window": 16}),
    "glm4_moe": ("glm4_moe", {**_K3, "n_group": 1}),
    "deepseek_v3": (
        "deepseek_v3",
        {**(MLA | _K3), "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "granitemoe": ("granitemoe", _E4),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_num_shared_experts": 1}),
}

SUPPORTED = tuple(_CONFIGS)

EVERY = [
    pytest.param(name, marks=() if name in PAPER_FAMILIES else pytest.mark.slow)
    for name in SUPPORTED
]
"""Those of :data:`SUPPORTED` as cases of a test, of which the paper's families are quick."""

ROUNDING = {"rtol": 0.0, "atol": 1e-4}
"""By how much rounding may move a model's logits; a drop moves them 20 times as far."""


def make(name: str, *, seed: int = 0, experts: str | None = None) -> PreTrainedModel:
    """Return a tiny model of :data:`SUPPORTED`."""
    family, settings = _CONFIGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(family, _SHAPE | settings, experts=experts)


def similarities(model: PreTrainedModel) -> list[Tensor]:
    """Return a similarity of the experts of each MoE layer [E, E], drawn at random."""
    drawn = []
    for layer, of in enumerate(find_moe_layers(model)):
        generator = torch.Generator().manual_seed(layer)
        drawn_EE = torch.rand(of.n_experts, of.n_experts, generator=generator)
        drawn.append(((drawn_EE + drawn_EE.T) / 2).fill_diagonal_(1))
    return drawn


def batch(seed: int = 0, n_sequences: int = 4, n_positions: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (n_sequences, n_positions), generator=generator)


@torch.no_grad()
def logits(model: Any, tokens: Tensor | None = None, **call: Any) -> Tensor:
    """Return the logits of a forward of :func:`batch`, or of other tokens."""
    return model(batch() if tokens is None else tokens, **call).logits  # type: ignore[no-any-return]


def counted(meter: Meter) -> dict[str, Any]:
    """Return all that a meter counted: numbers that rounding does not touch."""
    layers = meter.report()["layers"]
    for layer in layers:
        del layer["weight_deviation"]
    return {"summary": meter.summary(), "layers": layers}


@contextmanager
def called(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Note the indices and weights [N, S] that each layer's experts are called with."""
    calls: list[tuple[Tensor, Tensor]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda _, call: calls.append((call[1].clone(), call[2].clone()))
        )
        for module in model.modules()
        if is_experts(module)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def during(module: nn.Module, act: Callable[[], Any]) -> Iterator[None]:
    """Do something whenever a module begins."""
    handle = module.register_forward_pre_hook(lambda *_: (act(), None)[1])
    try:
        yield
    finally:
        handle.remove()
