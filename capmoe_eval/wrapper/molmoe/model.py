"""Define MolmoE: transformers' OLMoE, to whose embeddings the features of images are added."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, OlmoeModel, PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast

from capmoe_eval.wrapper.molmoe.configuration import MolmoeConfig
from capmoe_eval.wrapper.molmoe.vision import VisionBackbone

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
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
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
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_masks: Tensor | None = None,
        image_input_idx: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of a batch, and the cache.

        Args:
            input_ids: Tokens [B, S], or ``inputs_embeds`` in their place.
            attention_mask: 1 for tokens and 0 for pads, of the cache as well.
            position_ids: The number of each position; by default pads have none.
            past_key_values: The cache of a generation.
            inputs_embeds: Embeddings [B, S, H].
            pixel_values: Crops of the sequences' images as patches [B, N, P, D].
            image_masks: Share of each patch that is no padding [B, N, P].
            image_input_idx: Position of each token of the crops [B, N, I]; negative for one that
                has none, as all of a crop that fills up the batch.
            logits_to_keep: How many positions from the end get logits; 0 for all.
            **kwargs: Passed to the language model.

        Raises:
            ValueError: If the crops' tokens are not where the placeholders are.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        assert inputs_embeds is not None
        if pixel_values is not None:
            assert image_masks is not None and image_input_idx is not None
            features = self.vision_backbone(pixel_values.flatten(0, 1), image_masks.flatten(0, 1))
            inputs_embeds = self._with_images(inputs_embeds, input_ids, features, image_input_idx)
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            numbers_BS = attention_mask.long().cumsum(dim=-1) - 1
            position_ids = numbers_BS.clamp_min(0)[:, -inputs_embeds.shape[1] :]
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        return CausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:]),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

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
