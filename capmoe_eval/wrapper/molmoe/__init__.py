"""MolmoE for transformers 5, by its checkpoint's own names.

The hub has MolmoE as code of its own, for transformers 4.46 to 4.53. Its language model is an OLMoE
with a larger vocabulary, which transformers has; here are the rest and the names of the tensors.
`docs/reference/image_tasks.md` says how it was compared with that code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import OlmoeConfig, PreTrainedConfig

SPECIAL_TOKENS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
"""Molmo's own tokens; their ids follow the ``vocab_size`` of its configuration."""

# What a checkpoint may say of its parts, each of which is here in one form only.
_ONLY = {
    "block_type": "moe",
    "activation_type": "swiglu",
    "layer_norm_type": "rms",
    "rope": True,
    "rope_impl": "llama",
    "rope_full_precision": True,
    "use_position_ids": True,
    "attention_layer_norm": True,
    "float32_attention": True,
    "norm_after": False,
    "n_kv_heads": None,
    "clip_qkv": None,
    "include_bias": False,
    "qkv_bias": False,
    "bias_for_layer_norm": False,
    "weight_tying": False,
    "scale_logits": False,
    "normalize_input_embeds": False,
    "final_logit_softcapping": None,
    "unconditioned": False,
    "use_cls_feature": False,
    "image_pooling_2d": "attention-meanq",
    "image_pooling_h": 2,
    "image_pooling_w": 2,
    "image_projector": "mlp",
    "image_padding_embed": "pad_and_partial_pad",
}
_ONLY_VISION = {"image_model_type": "openai", "image_mlp_activations": "quick_gelu"}


class MolmoeVisionConfig(PreTrainedConfig):
    """Sizes of the tower and of what joins it to the language model.

    The defaults are those of MolmoE-1B.
    """

    model_type = "molmoe_vision"

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 23
    num_attention_heads: int = 16
    patch_size: int = 14  # pixels
    num_positions: int = 577  # of the patches of a crop, and one of the class
    norm_eps: float = 1e-5
    layers: list[int] | tuple[int, ...] = (-2, -9)  # whose outputs, side by side, are the features

    @property
    def patches_per_side(self) -> int:
        """Patches in a row, and in a column, of a crop."""
        return math.isqrt(self.num_positions - 1)


class MolmoeConfig(PreTrainedConfig):
    """Configuration of MolmoE: an OLMoE, a tower, and the tokens that an image becomes.

    ``vocab_size`` counts the tokens that have logits; the language model knows a few more.
    """

    model_type = "molmo"
    sub_configs_defaults: ClassVar = {
        "text_config": OlmoeConfig,
        "vision_config": MolmoeVisionConfig,
    }

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    vocab_size: int = 50304
    image_token_id: int = 50282  # stands for 2 × 2 patches
    image_row_end_id: int = 50283  # behind every row of them
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration of a ``config.json``, the hub's or one that was saved from here.

        Raises:
            ValueError: If it is of another Molmo.
        """
        if "text_config" not in config_dict:
            config_dict = _from_hub(config_dict)
        return super().from_dict(config_dict, **kwargs)


def _from_hub(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json`` of the hub."""
    if not hub.get("moe_num_experts") or "d_model" not in hub:
        raise ValueError(
            "this Molmo has no experts; of Molmo, MolmoE alone is known here (MolmoE-1B-0924)"
        )
    vision = hub.get("vision_backbone") or {}
    for part, only in ((hub, _ONLY), (vision, _ONLY_VISION)):
        for field, value in only.items():
            if part.get(field, value) != value:
                raise ValueError(f"{field}={part[field]!r} is not known here, {value!r} is")
    emb_dim, heads = vision["image_emb_dim"], vision["image_num_heads"]
    if (vision["image_num_key_value_heads"], vision["image_head_dim"]) != (heads, emb_dim // heads):
        raise ValueError("the heads of its tower are not the whole width, or share keys")
    width = hub["d_model"]
    logits = hub.get("embedding_size") or hub["vocab_size"]
    inner = hub.get("mlp_hidden_size") or hub["mlp_ratio"] * width
    return {
        "architectures": ["MolmoeForConditionalGeneration"],
        "dtype": hub.get("torch_dtype"),
        "vocab_size": logits,
        "image_token_id": hub["vocab_size"] + SPECIAL_TOKENS.index("<im_patch>"),
        "image_row_end_id": hub["vocab_size"] + SPECIAL_TOKENS.index("<im_col>"),
        "text_config": {
            "vocab_size": logits + (hub.get("additional_vocab_size") or 0),
            "hidden_size": width,
            "intermediate_size": inner // 2,  # the halves of a SwiGLU
            "num_hidden_layers": hub["n_layers"],
            "num_attention_heads": hub["n_heads"],
            "max_position_embeddings": hub.get("max_position_embeddings")
            or hub["max_sequence_length"],
            "rms_norm_eps": hub.get("layer_norm_eps") or 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": hub["rope_theta"]},
            "num_experts": hub["moe_num_experts"],
            "num_experts_per_tok": hub["moe_top_k"],
            "norm_topk_prob": False,
            "eos_token_id": hub["vocab_size"] - 1,
        },
        "vision_config": {
            "hidden_size": emb_dim,
            "intermediate_size": vision["image_mlp_dim"],
            "num_hidden_layers": vision["image_num_layers"],
            "num_attention_heads": heads,
            "patch_size": vision["image_patch_size"],
            "num_positions": vision["image_num_pos"],
            "norm_eps": vision["image_norm_eps"],
            "layers": list(hub["vit_layers"]),
        },
    }
