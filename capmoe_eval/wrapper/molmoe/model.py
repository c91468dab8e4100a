"""Define MolmoE: a tower for images, and transformers' OLMoE, to whose embeddings it adds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, OlmoeModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from capmoe_eval.wrapper.molmoe import MolmoeConfig, MolmoeVisionConfig

# Shape suffixes: N crops (or windows), P patches of a crop, Q queries, C width of the tower, F of
# its features (several layers side by side), D numbers of a patch, I tokens of a crop, H width of
# the language model.


class Attention(nn.Module):
    """Attention of a few queries over patches, in float32."""

    def __init__(self, config: MolmoeVisionConfig, width: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.wq = nn.Linear(width, config.hidden_size)
        self.wk = nn.Linear(width, config.hidden_size)
        self.wv = nn.Linear(width, config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, queries_NQC: Tensor, patches_NPC: Tensor) -> Tensor:
        """Return one vector per query [N, Q, C]."""
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2).float()
            for projected in (self.wq(queries_NQC), self.wk(patches_NPC), self.wv(patches_NPC))
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2).to(queries_NQC.dtype))
        return output


class Block(nn.Module):
    """A block of the tower: attention and linear layers, each behind a norm."""

    def __init__(self, config: MolmoeVisionConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention = Attention(config, width)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                w1=nn.Linear(width, inner), act=ACT2FN["quick_gelu"], w2=nn.Linear(inner, width)
            )
        )
        self.attention_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.ffn_norm = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(self, hidden_NPC: Tensor) -> Tensor:
        """Return the states after this block [N, P, C]."""
        normed_NPC = self.attention_norm(hidden_NPC)
        hidden_NPC = hidden_NPC + self.attention(normed_NPC, normed_NPC)
        output_NPC: Tensor = hidden_NPC + self.feed_forward(self.ffn_norm(hidden_NPC))
        return output_NPC


class Tower(nn.Module):
    """CLIP's vision transformer, which reads patches as rows of numbers."""

    def __init__(self, config: MolmoeVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(config.num_positions, width))
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, eps=config.norm_eps)
        self.transformer = nn.ModuleDict(
            {"resblocks": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))}
        )

    def forward(self, patches_NPD: Tensor) -> list[Tensor]:
        """Return the states after every block [N, 1 + P, C], the class first."""
        embedded_NPC = self.patch_embedding(patches_NPD)
        first_N1C = self.class_embedding.expand(len(embedded_NPC), 1, -1)
        hidden_NPC = torch.cat([first_N1C, embedded_NPC], dim=1) + self.positional_embedding
        hidden_NPC = self.pre_ln(hidden_NPC)
        states = []
        for block in self.transformer["resblocks"].children():
            hidden_NPC = block(hidden_NPC)
            states.append(hidden_NPC)
        return states


class Projector(nn.Module):
    """The SwiGLU that leads from the tower to the language model."""

    def __init__(self, width: int, inner: int, output: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, output, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return vectors of the language model's width."""
        output: Tensor = self.w2(nn.functional.silu(self.w1(hidden)) * self.w3(hidden))
        return output


class VisionBackbone(nn.Module):
    """The tower, what marks padding, the pooling of 2 × 2 patches, and the projector."""

    def __init__(self, config: MolmoeVisionConfig, inner: int, output: int) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size * len(config.layers)
        self.pad_embed = nn.Parameter(torch.zeros(2, width))  # of patches all and partly padding
        self.image_vit = Tower(config)
        self.image_pooling_2d = Attention(config, width)
        self.image_projector = Projector(config.hidden_size, inner, output)

    def forward(self, patches_NPD: Tensor, image_masks_NP: Tensor) -> Tensor:
        """Return the features of the tokens of every crop [N, I, H].

        Args:
            patches_NPD: The pixels of the patches of each crop.
            image_masks_NP: Share of each patch that is no padding.
        """
        states = self.image_vit(patches_NPD)
        features_NPF = torch.cat([states[layer][:, 1:] for layer in self.config.layers], dim=-1)
        # The remote code sets the features of a crop with the number −1 in it to zero, as one that
        # fills up a batch. Such a crop's tokens have no place, and in bfloat16 many a pixel is −1.
        padding_NP = image_masks_NP == 0
        partly_NP = (image_masks_NP < 1) & ~padding_NP
        dtype = features_NPF.dtype
        for mark_F, where_NP in zip(self.pad_embed, (padding_NP, partly_NP), strict=True):
            features_NPF = features_NPF + mark_F * where_NP[..., None].float()
        windows = _windows(features_NPF.to(dtype), self.config.patches_per_side)
        pooled = self.image_pooling_2d(windows.mean(dim=1, keepdim=True), windows)
        tokens_NIC = pooled.view(len(patches_NPD), -1, pooled.shape[-1])
        projected_NIH: Tensor = self.image_projector(tokens_NIC)
        return projected_NIH


def _windows(features_NPF: Tensor, side: int) -> Tensor:
    """Return the four patches of every window of 2 × 2 [N · P/4, 4, F], row by row of the crop."""
    grid = features_NPF.view(len(features_NPF), side // 2, 2, side // 2, 2, -1)
    return grid.transpose(2, 3).reshape(-1, 4, features_NPF.shape[-1])


# Shape suffixes: B sequences, S positions, N crops of a sequence (padded), P patches of a crop, D
# numbers of a patch, I tokens of a crop, H width.

_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
CHECKPOINT_NAMES = [
    WeightRenaming(r"^model\.vision_backbone\.", "vision_backbone."),
    WeightRenaming(r"^model\.transformer\.ln_f\.", "language_model.norm."),
    WeightRenaming(_LAYER + r"attn\.attn_norm\.", r"language_model.layers.\1.input_layernorm."),
    WeightRenaming(
        _LAYER + r"mlp\.ff_norm\.", r"language_model.layers.\1.post_attention_layernorm."
    ),
    WeightRenaming(_LAYER + r"attn\.attn_out\.", r"language_model.layers.\1.self_attn.o_proj."),
    WeightRenaming(_LAYER + r"attn\.", r"language_model.layers.\1.self_attn."),
    WeightRenaming(_LAYER + r"mlp\.", r"language_model.layers.\1.mlp."),
    WeightConverter(
        source_patterns="self_attn.att_proj.weight",
        target_patterns=[f"self_attn.{part}_proj.weight" for part in "qkv"],
        operations=[Chunk(dim=0)],
    ),
    WeightConverter(
        source_patterns=[
            r"model.transformer.wte.embedding",
            r"model.transformer.wte.new_embedding",
        ],
        target_patterns="language_model.embed_tokens.weight",
        operations=[Concatenate(dim=0)],
    ),
]
"""From the checkpoint's names of tensors to the modules of :class:`MolmoeForConditionalGeneration`.

The experts are merged as those of every OLMoE.
"""


class MolmoeForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """MolmoE with its head."""

    config_class = MolmoeConfig
    input_modalities = ("image", "text")
    _no_split_modules: ClassVar = ["OlmoeDecoderLayer", "Block"]
    _skip_keys_device_placement: ClassVar = ["cache", "past_key_values"]  # to and from 5.24
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        text: Any = config.text_config
        self.language_model = OlmoeModel(text)
        vision: Any = config.vision_config
        self.vision_backbone = VisionBackbone(vision, text.intermediate_size, text.hidden_size)
        self.lm_head = nn.Linear(text.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of the language model."""
        embeddings: nn.Module = self.language_model.get_input_embeddings()
        return embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_masks: Tensor | None = None,
        image_input_idx: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Return the logits of a batch, and the cache.

        Args:
            input_ids: Tokens [B, S], or ``inputs_embeds`` in their place.
            attention_mask: 1 for tokens and 0 for pads, of the cache as well.
            position_ids: The number of each position; by default pads have none.
            inputs_embeds: Embeddings [B, S, H].
            pixel_values: Crops of the sequences' images as patches [B, N, P, D].
            image_masks: Share of each patch that is no padding [B, N, P].
            image_input_idx: Position of each token of the crops [B, N, I]; negative for one that
                has none, as all of a crop that fills up the batch.
            logits_to_keep: How many positions from the end get logits; 0 for all.
            **kwargs: Passed to the language model, the cache among them, whatever its name.

        Raises:
            ValueError: If the crops' tokens are not where the placeholders are.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        assert inputs_embeds is not None
        if pixel_values is not None:
            assert image_masks is not None
            assert image_input_idx is not None
            features = self.vision_backbone(pixel_values.flatten(0, 1), image_masks.flatten(0, 1))
            inputs_embeds = self._with_images(inputs_embeds, input_ids, features, image_input_idx)
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            numbers_BS = attention_mask.long().cumsum(dim=-1) - 1
            position_ids = numbers_BS.clamp_min(0)[:, -inputs_embeds.shape[1] :]
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.lm_head(outputs["last_hidden_state"][:, -logits_to_keep:])
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return MoeCausalLMOutputWithPast(logits=logits, **rest)

    def _with_images(
        self,
        embeddings_BSH: Tensor,
        input_ids: Tensor | None,
        features: Tensor,
        image_input_idx: Tensor,
    ) -> Tensor:
        """Return the embeddings with the features of each crop's tokens added in their places."""
        position_BT = image_input_idx.flatten(1)
        row_N, token_N = (position_BT >= 0).nonzero(as_tuple=True)
        position_N = position_BT[row_N, token_N]
        if input_ids is not None:
            told_BS = torch.zeros_like(input_ids, dtype=torch.bool)
            told_BS[row_N, position_N] = True
            if not torch.equal(told_BS, input_ids == self.config.image_token_id):
                raise ValueError(
                    "image_input_idx: the tokens of the images are not at the placeholders (token "
                    f"{self.config.image_token_id}); give what MolmoE's own processor returns"
                )
        features_BTH = features.view(*position_BT.shape, -1).to(embeddings_BSH)
        with_images_BSH = embeddings_BSH.clone()
        with_images_BSH[row_N, position_N] += features_BTH[row_N, token_N]
        return with_images_BSH
