"""Build tiny Mixture-of-Experts models: transformers' own classes with small random weights.

They are **untrained** and score as chance does. With them every command of the suite runs anywhere
in seconds. Their routing is skewed like that of trained models, so that a capacity drops tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from capmoe_eval.errors import bad_choice

END_OF_TEXT_ID = 0
PADDING_ID = 1
#: Longest sequence in tokens.
MAX_POSITIONS = 4096

# Measured on the synthetic documents: the fullest expert of a model then has 3 to 5 times the mean
# load (2 for Mixtral, where 4 is the most that is possible), and its top-k hold about half to two
# thirds of the router's probability.
_SKEW = 0.8
_SHARPNESS = 1.25
# With random weights the experts contribute little to a block's output; doubled, drops show.
_EXPERT_GAIN = 2.0

_HIDDEN = 64
_COMMON: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": PADDING_ID,
    "tie_word_embeddings": False,
    # A linear map of unit-variance input then has unit-variance output at any width; with the usual
    # 0.02 and a width of 64 the blocks would add next to nothing to the residual stream.
    "initializer_range": _HIDDEN**-0.5,
}
#: The fields that differ between families. Each keeps the ratio E/K of its original (in brackets).
_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    # 32/4 [OLMoE-1B-7B: 64/8]; weights are not normalised over the top-k.
    "olmoe": (
        OlmoeConfig,
        {
            "intermediate_size": 32,
            "num_key_value_heads": 4,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
    ),
    # 30/2 [Qwen1.5-MoE-A2.7B: 60/4]: divisible by six ranks; a gated shared expert.
    "qwen2_moe": (
        Qwen2MoeConfig,
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 128,
            "num_key_value_heads": 4,
            "num_experts": 30,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    # 32/2 [Qwen3-30B-A3B: 128/8]; weights are normalised over the top-k; grouped-query attention.
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "moe_intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 32,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    # 32/3 [DeepSeek-V2-Lite: 64/6]; two shared experts, a dense first layer, latent attention
    # without query compression.
    "deepseek_v2": (
        DeepseekV2Config,
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 32,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    # 8/2 [Mixtral-8x7B: 8/2]; weights are always normalised over the top-k.
    "mixtral": (
        MixtralConfig,
        {
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}
#: The families that have a tiny model.
TINY_FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, vocab_size: int, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a tiny model, a scaled-down form of the family's original.

    Args:
        family: One of ``TINY_FAMILIES``.
        vocab_size: Number of tokens.
        **changes: Fields of the configuration to change.

    Raises:
        UsageError: If the family is unknown.
    """
    if family not in _FAMILIES:
        raise bad_choice("family", family, TINY_FAMILIES)
    config_class, own = _FAMILIES[family]
    return config_class(vocab_size=vocab_size, **{**_COMMON, **own, **changes})


def tiny_model(
    family: str, *, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build an untrained tiny model on the CPU, in evaluation mode.

    The same arguments give the same weights; another ``dtype`` gives the same weights rounded.
    torch's random state is not changed.

    Args:
        family: One of ``TINY_FAMILIES``.
        vocab_size: Number of tokens.
        seed: Seed of the weights.
        dtype: Type of the weights.

    Raises:
        UsageError: If the family is unknown.
    """
    config = tiny_config(family, vocab_size)
    # torch.manual_seed would also seed the generators of accelerators, which the fork leaves out.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        nn.init.normal_(model.get_input_embeddings().weight)
        for name, parameter in model.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                _skew(parameter)
            elif name.endswith(".mlp.experts.down_proj"):
                parameter.mul_(_EXPERT_GAIN)
    return model.to(dtype).eval()


def _skew(router_EH: torch.Tensor) -> None:
    """Scale the rows of a router in place, so that some experts get more tokens than others.

    For zero-mean inputs a longer row has larger positive logits and is chosen by more tokens.
    """
    num_experts = router_EH.shape[0]
    log_length_E = torch.linspace(-_SKEW, _SKEW, num_experts)[torch.randperm(num_experts)]
    router_EH.mul_(_SHARPNESS * log_length_E.exp()[:, None])
