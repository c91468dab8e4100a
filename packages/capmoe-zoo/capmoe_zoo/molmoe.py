"""MolmoE for transformers 5, by its checkpoint's own names.

The hub has MolmoE as code of its own, for transformers 4.46 to 4.53. Its language model is an OLMoE
with a larger vocabulary, and the layers of its tower are those of Molmo2; transformers has both.
Here are the configuration, what joins the parts, the names of the tensors, and the processor.
`docs/reference/image_tasks.md` says how it was compared with that code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    BatchFeature,
    GenerationMixin,
    OlmoeConfig,
    OlmoeModel,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, make_nested_list_of_images
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.molmo2.configuration_molmo2 import Molmo2AdapterConfig, Molmo2VisionConfig
from transformers.models.molmo2.image_processing_molmo2 import select_tiling
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2ImageProjectorMLP,
    Molmo2VisionAttention,
    Molmo2VisionEncoderLayer,
)
from transformers.utils import is_vision_available

if TYPE_CHECKING:
    from PIL import Image

# Shape suffixes. Of images: Y, X of pixels (or tokens of a grid), C colours, N crops, P patches of
# a crop, D numbers of a patch, I tokens of a crop, T tokens of an image with those around it. Of
# the tower: N crops (or windows), C its width, F its features (several layers side by side). Of the
# language model: B sequences, S positions, H width.

SPECIAL_TOKENS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
"""Molmo's own tokens; their ids follow the ``vocab_size`` of its configuration."""


class MolmoeConfig(PreTrainedConfig):
    """Configuration of MolmoE: an OLMoE, a tower, and the tokens that an image becomes.

    ``vocab_size`` counts the tokens that have logits; the language model knows a few more.
    """

    model_type = "molmo"
    sub_configs_defaults: ClassVar = {
        "text_config": OlmoeConfig,
        "vision_config": Molmo2VisionConfig,
        "adapter_config": Molmo2AdapterConfig,
    }

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    adapter_config: dict[str, Any] | PreTrainedConfig | None = None
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
    attention = {
        "hidden_size": vision["image_emb_dim"],
        "num_attention_heads": vision["image_num_heads"],
        "num_key_value_heads": vision["image_num_heads"],
        "head_dim": vision["image_emb_dim"] // vision["image_num_heads"],
    }
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
            **attention,
            "intermediate_size": vision["image_mlp_dim"],
            "num_hidden_layers": vision["image_num_layers"],
            "hidden_act": "quick_gelu",
            "layer_norm_eps": vision["image_norm_eps"],
            "patch_size": vision["image_patch_size"],
            "num_position_embeddings": vision["image_num_pos"],  # of the patches and of the class
        },
        "adapter_config": {
            **attention,
            "vision_feature_layer": list(hub["vit_layers"]),
            "intermediate_size": inner // 2,
            "text_hidden_size": width,
        },
    }


# The model: a tower for images, and transformers' OLMoE, to whose embeddings it adds.


class Tower(nn.Module):
    """CLIP's vision transformer, which reads patches as rows of numbers."""

    def __init__(self, config: Molmo2VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(config.num_position_embeddings, width))
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, eps=config.layer_norm_eps)
        layers = (Molmo2VisionEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(layers)})

    def forward(self, patches_NPD: Tensor) -> list[Tensor]:
        """Return the states after every block [N, 1 + P, C], the class first."""
        embedded_NPC = self.patch_embedding(patches_NPD)
        first_N1C = self.class_embedding.expand(len(embedded_NPC), 1, -1)
        hidden_NPC = torch.cat([first_N1C, embedded_NPC], dim=1) + self.positional_embedding
        hidden_NPC = self.pre_ln(hidden_NPC)
        states = []
        for block in self.transformer["resblocks"].children():
            hidden_NPC = block(hidden_NPC, None)
            states.append(hidden_NPC)
        return states


class VisionBackbone(nn.Module):
    """The tower, the embedding of padding, the pooling of 2 × 2 patches, and the projector."""

    def __init__(self, vision: Molmo2VisionConfig, adapter: Molmo2AdapterConfig) -> None:
        super().__init__()
        self.layers = adapter.vision_feature_layer  # whose outputs, side by side, are the features
        self.patches_per_side = math.isqrt(vision.num_position_embeddings - 1)
        width = vision.hidden_size * len(self.layers)
        self.pad_embed = nn.Parameter(torch.zeros(2, width))  # of patches all and partly padding
        self.image_vit = Tower(vision)
        self.image_pooling_2d = Molmo2VisionAttention(adapter, width)
        self.image_projector = Molmo2ImageProjectorMLP(adapter)

    def forward(self, patches_NPD: Tensor, image_masks_NP: Tensor) -> Tensor:
        """Return the features of the tokens of every crop [N, I, H].

        Args:
            patches_NPD: The pixels of the patches of each crop.
            image_masks_NP: Share of each patch that is no padding.
        """
        states = self.image_vit(patches_NPD)
        features_NPF = torch.cat([states[layer][:, 1:] for layer in self.layers], dim=-1)
        # The remote code sets the features of a crop with the number −1 in it to zero, as one that
        # fills up a batch. Such a crop's tokens have no place, and in bfloat16 many a pixel is −1.
        padding_NP = image_masks_NP == 0
        partly_NP = (image_masks_NP < 1) & ~padding_NP
        dtype = features_NPF.dtype
        for mark_F, where_NP in zip(self.pad_embed, (padding_NP, partly_NP), strict=True):
            features_NPF = features_NPF + mark_F * where_NP[..., None].float()
        # The four patches of every window of 2 × 2, row by row of the crop [N · P/4, 4, F].
        half = self.patches_per_side // 2
        grid = features_NPF.to(dtype).view(-1, half, 2, half, 2, features_NPF.shape[-1])
        windows = grid.transpose(2, 3).reshape(-1, 4, grid.shape[-1])
        pooled, _ = self.image_pooling_2d(windows.mean(dim=1, keepdim=True), windows)
        projected_NIH: Tensor = self.image_projector(pooled.view(len(patches_NPD), half**2, -1))
        return projected_NIH


_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
_RENAMED = {
    r"^model\.vision_backbone\.": "vision_backbone.",
    **{
        rf"resblocks\.(\d+)\.{old}\.": rf"resblocks.\1.{new}."
        for old, new in {
            **{rf"attention\.w{part}": f"self_attn.{part}_proj" for part in "qkvo"},
            **{r"feed_forward\.w1": "mlp.fc1", r"feed_forward\.w2": "mlp.fc2"},
            **{"attention_norm": "layer_norm1", "ffn_norm": "layer_norm2"},
        }.items()
    },
    **{rf"image_pooling_2d\.w{part}\.": f"image_pooling_2d.{part}_proj." for part in "qkvo"},
    r"image_projector\.w1\.": "image_projector.gate_proj.",
    r"image_projector\.w2\.": "image_projector.down_proj.",
    r"image_projector\.w3\.": "image_projector.up_proj.",
    r"^model\.transformer\.ln_f\.": "language_model.norm.",
    _LAYER + r"attn\.attn_norm\.": r"language_model.layers.\1.input_layernorm.",
    _LAYER + r"mlp\.ff_norm\.": r"language_model.layers.\1.post_attention_layernorm.",
    _LAYER + r"attn\.attn_out\.": r"language_model.layers.\1.self_attn.o_proj.",
    _LAYER + r"attn\.": r"language_model.layers.\1.self_attn.",
    _LAYER + r"mlp\.": r"language_model.layers.\1.mlp.",
}
CHECKPOINT_NAMES = [
    *(WeightRenaming(*names) for names in _RENAMED.items()),
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
    _no_split_modules: ClassVar = ["OlmoeDecoderLayer", "Molmo2VisionEncoderLayer"]
    _skip_keys_device_placement: ClassVar = ["cache", "past_key_values"]  # to and from 5.24
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        text: Any = config.text_config
        self.language_model = OlmoeModel(text)
        vision: Any = config.vision_config
        adapter: Any = config.adapter_config
        # transformers sets the kernel of attention of models alone, and has no public name for it.
        vision._attn_implementation = adapter._attn_implementation = config._attn_implementation
        self.vision_backbone = VisionBackbone(vision, adapter)
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


# Images and prompts as the model's inputs, by the hub's ``preprocessor_config.json``.

NOWHERE = -100
"""Position of a crop's token that stands for nothing: a neighbour has it."""


Marks = tuple[int, int, int, int]
"""Ids of the tokens that begin and end a picture, stand for 2 × 2 patches, and end a row."""


class MolmoImageProcessor(BaseImageProcessor):
    """The sizes of crops and the statistics of pixels, under the hub's names.

    Crops are squares of an even number of patches in a grid. A crop gives up a margin of patches on
    each side where it has a neighbour.
    """

    model_input_names: ClassVar = ["pixel_values", "image_masks", "image_input_idx"]

    max_crops: int = 12  # in the grid
    overlap_margins: Sequence[int] = (4, 4)  # patches
    base_image_input_size: Sequence[int] = (336, 336)  # pixels
    image_patch_size: int = 14  # pixels
    image_mean: Sequence[float] = OPENAI_CLIP_MEAN
    image_std: Sequence[float] = OPENAI_CLIP_STD

    def sizes(self) -> tuple[int, int, int]:
        """Return the patches of a crop's side, of its margin, and from one crop to the next."""
        side = self.base_image_input_size[0] // self.image_patch_size
        margin = self.overlap_margins[0]
        return side, margin, side - 2 * margin

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the place of each token of the crops of a grid, row by row [N, I].

        Places are counted over the grid's tokens with one more token behind every row; a token
        that a neighbouring crop has is :data:`NOWHERE`.
        """
        side, margin, step = (patches // 2 for patches in self.sizes())
        y, x = (torch.arange(step * n + 2 * margin, device="cpu") for n in (rows, columns))
        row_Y = ((y - margin) // step).clip(0, rows - 1)  # the crop that has each token
        column_X = ((x - margin) // step).clip(0, columns - 1)
        crop_NI = _tiles(row_Y[:, None] * columns + column_X, side, step).flatten(1)
        place_NI = _tiles(y[:, None] * (len(x) + 1) + x, side, step).flatten(1)
        number_N = torch.arange(len(crop_NI), device="cpu")
        return place_NI.where(crop_NI == number_N[:, None], NOWHERE)

    def crops(
        self, image: Image.Image, marks: Marks, before: int
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return an image's tokens, and the model's inputs of its crops by their names.

        The inputs are those of :meth:`MolmoeForConditionalGeneration.forward` for one sequence:
        the whole image first, then the grid row by row. ``before`` tokens come before the image.
        From each colour, 0 to 1, the mean is subtracted, then it is divided by the deviation.
        """
        pixels_YXC = np.array(image.convert("RGB"))
        patch = self.image_patch_size
        side, margin, step = (patches * patch for patches in self.sizes())
        # Of the grids that need no shrinking, the one that enlarges least; if all need it, the one
        # that shrinks least. Of equals, the one with fewest crops, then fewest rows.
        inner = (length - 2 * margin for length in pixels_YXC.shape[:2])
        rows, columns = select_tiling(*inner, step, self.max_crops)
        statistics = [self.image_mean, self.image_std]
        numbers_2C = torch.tensor(statistics, dtype=torch.float32, device="cpu")
        mean_C111, std_C111 = numbers_2C[..., None, None, None]
        whole_CYX, _ = _fitted(pixels_YXC, side, side)
        canvas = (step * (n - 1) + side for n in (rows, columns))
        large_CYX, inside_YX = _fitted(pixels_YXC, *canvas)
        crops_CNYX = torch.cat([whole_CYX[:, None], _tiles(large_CYX, side, step)], dim=1)
        crops_CNYX = (crops_CNYX - mean_C111) / std_C111
        masks_NP = _tiles(_tiles(inside_YX, side, step), patch, patch).flatten(2).mean(dim=2)
        # MolmoE was trained with the masks one crop too early: the whole image has the first
        # crop's, and the last crop none, which is written −1.
        masks_NP = torch.cat([masks_NP, torch.full_like(masks_NP[:1], -1)])
        start, end, token, row_end = marks
        tokens: list[int] = []
        positions = []
        for grid in ((1, 1), (rows, columns)):
            place_NI = self.positions(*grid)
            positions.append(shifted(place_NI, before + len(tokens) + 1))
            height, width = ((step * n + 2 * margin) // (2 * patch) for n in grid)
            tokens += [start, *([token] * width + [row_end]) * height, end]
        patches_NPD = _tiles(crops_CNYX, patch, patch).movedim(0, -1).flatten(2)
        inputs = (patches_NPD, masks_NP, torch.cat(positions))
        return tokens, dict(zip(self.model_input_names, inputs, strict=True))


def shifted(position_NI: Tensor, places: int | Tensor) -> Tensor:
    """Return positions, each ``places`` higher; :data:`NOWHERE` stays."""
    return torch.where(position_NI < 0, position_NI, position_NI + places)


def _fitted(pixels_YXC: NDArray[np.uint8], height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return an image in the middle of a black canvas, 0 to 1 [C, Y, X], and 1 where it is."""
    scale = min(
        np.float32(space) / np.float32(side)
        for space, side in zip((height, width), pixels_YXC.shape[:2], strict=True)
    )
    scaled = tuple(int(np.float32(side) * scale) for side in pixels_YXC.shape[:2])
    pixels = torch.from_numpy(pixels_YXC).permute(2, 0, 1)[None].float() / 255
    pixels = nn.functional.interpolate(
        pixels, scaled, mode="bilinear", align_corners=False, antialias=True
    )
    top, left = (height - scaled[0]) // 2, (width - scaled[1]) // 2
    around = (left, width - scaled[1] - left, top, height - scaled[0] - top)
    pixels_CYX = pixels[0].clip(0, 1)
    return (
        nn.functional.pad(pixels_CYX, around),
        nn.functional.pad(torch.ones_like(pixels_CYX[0]), around),
    )


def _tiles(picture: Tensor, side: int, step: int) -> Tensor:
    """Return the squares of a picture […, Y, X] that begin every ``step`` […, N, side, side]."""
    return picture.unfold(-2, side, step).unfold(-2, side, step).flatten(-4, -3)


class MolmoProcessor(ProcessorMixin):
    """MolmoE's images and prompts, each prompt in the form that it was trained with.

    The images of a prompt come first, and the prompt becomes ``User: … Assistant:``.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)
        start, end, patch, row_end, _ = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        self.marks = (start, end, patch, row_end)
        self.image_token = tokenizer.convert_ids_to_tokens(patch)

    def __call__(self, images: Any = None, text: Any = None, **_kwargs: Any) -> BatchFeature:
        """Return a batch of prompts with their images, padded on the tokenizer's side.

        Args:
            images: The images of each prompt, a list of lists; or one prompt's, a list.
            text: The prompts, each with one :attr:`image_token` for each of its images.
            **_kwargs: What other processors take (``truncation``, ``padding``); none is asked.

        Raises:
            ValueError: If a prompt has another number of placeholders than images.
        """
        prompts = [text] if isinstance(text, str) else list(text)
        none = images is None or images == []
        of_prompts = [[] for _ in prompts] if none else make_nested_list_of_images(images)
        rows = [self._row(*pair) for pair in zip(prompts, of_prompts, strict=True)]
        words = {"input_ids": [tokens for tokens, _ in rows]}
        data = dict(self.tokenizer.pad(words, return_tensors="pt", verbose=False))
        all_crops = [crops for _, crops in rows]
        if any(all_crops):
            empty = {"pixel_values": 0, "image_masks": 0, "image_input_idx": NOWHERE}
            for name, value in empty.items():
                data[name] = _filled([[crops[name] for crops in row] for row in all_crops], value)
            pads_B = data["attention_mask"].argmax(dim=1)  # before each prompt
            data["image_input_idx"] = shifted(data["image_input_idx"], pads_B[:, None, None])
        return BatchFeature(data)

    def _row(
        self, prompt: str, images: Sequence[Image.Image]
    ) -> tuple[list[int], list[dict[str, Tensor]]]:
        """Return a prompt's tokens, those of its images among them, and its images' crops."""
        if prompt.count(self.image_token) != len(images):
            raise ValueError(
                f"text: {prompt.count(self.image_token)} placeholders {self.image_token} for "
                f"{len(images)} images in {prompt[:60]!r}"
            )
        question = prompt.replace(self.image_token, "").strip()
        words = self.tokenizer.encode(f" User: {question} Assistant:", add_special_tokens=False)
        first = self.tokenizer.bos_token_id
        tokens = [self.tokenizer.eos_token_id if first is None else first]
        all_crops = []
        for image in images:
            image_tokens, crops = self.image_processor.crops(image, self.marks, len(tokens))
            all_crops.append(crops)
            tokens += image_tokens
        return tokens + words, all_crops


def _filled(rows: Sequence[list[Tensor]], value: float) -> Tensor:
    """Return the crops of all sequences as one tensor, the shorter sequences filled up."""
    none = next(parts[0] for parts in rows if parts)[:0]
    return pad_sequence(
        [torch.cat([none, *parts]) for parts in rows], batch_first=True, padding_value=value
    )


def register() -> None:
    """Register MolmoE under the hub's ``model_type``, ``molmo``."""
    AutoConfig.register(MolmoeConfig.model_type, MolmoeConfig)
    AutoModelForImageTextToText.register(MolmoeConfig, MolmoeForConditionalGeneration)
    if is_vision_available():  # else no image can be read
        AutoImageProcessor.register(MolmoeConfig, slow_image_processor_class=MolmoImageProcessor)
        AutoProcessor.register(MolmoeConfig, MolmoProcessor)
    register_checkpoint_conversion_mapping(MolmoeConfig.model_type, CHECKPOINT_NAMES)
