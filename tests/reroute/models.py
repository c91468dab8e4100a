"""Tiny random models of many architectures, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {
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
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe_normalised": (
        "Olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
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
        "Qwen3Moe",
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
        "DeepseekV2",
        {
            **_MLA,
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
        "DeepseekV2",
        {
            **_MLA,
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
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 16,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
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
        "DeepseekV3",
        {
            **_MLA,
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
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
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


def make(name: str, *, seed: int = 0, experts: str | None = None) -> PreTrainedModel:
    """Return a tiny model whose router has an opinion: its weights are scaled up after init."""
    prefix, settings = _CONFIGS[name]
    config_class: Callable[..., Any] = getattr(transformers, f"{prefix}Config")
    model_class: Any = getattr(transformers, f"{prefix}ForCausalLM")
    config = config_class(**(_SHAPE | settings))
    if experts is not None:
        config._experts_implementation = experts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for module_name, parameter in model.named_parameters():
            if "experts" in module_name:
                torch.nn.init.normal_(parameter, std=0.3)
            if "router" in module_name or module_name.endswith(("gate.weight", "moe_statics")):
                torch.nn.init.normal_(parameter, std=1.0)
        for module_name, buffer in model.named_buffers():
            if module_name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    return model


def batch(seed: int = 0, n_sequences: int = 4, n_positions: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (n_sequences, n_positions), generator=generator)
