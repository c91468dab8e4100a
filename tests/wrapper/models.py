"""Tiny random models of many architectures, made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from capmoe_eval.wrapper.layers import find_moe_layers
from tests.wrapper.architectures import VOCABULARY, build

_SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 2}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

PAPER_FAMILIES = ("olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "mixtral")
"""The families of the paper's models."""

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe_normalised": (
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **MLA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.7,
            "num_hidden_layers": 3,
        },
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {
            **MLA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 0,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 16,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **MLA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "head_dim": 8,
        },
    ),
}

SUPPORTED = tuple(_CONFIGS)

ROUNDING = {"rtol": 0.0, "atol": 1e-4}
"""By how much two computations of a model's logits may differ (``test_rounding.py``)."""


def make(name: str, *, seed: int = 0, experts: str | None = None) -> PreTrainedModel:
    """Return a tiny model of :data:`SUPPORTED`."""
    family, settings = _CONFIGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(family, _SHAPE | settings, experts=experts)


def similarities(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return a similarity of the experts of each MoE layer [E, E], drawn at random."""
    found = []
    for layer, of in enumerate(find_moe_layers(model)):
        generator = torch.Generator().manual_seed(layer)
        drawn_EE = torch.rand(of.n_experts, of.n_experts, generator=generator)
        found.append(((drawn_EE + drawn_EE.T) / 2).fill_diagonal_(1))
    return found


def batch(seed: int = 0, n_sequences: int = 4, n_positions: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (n_sequences, n_positions), generator=generator)
