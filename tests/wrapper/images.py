"""Tiny vision-language models with random weights, and batches with images for them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CLIPVisionConfig, LlavaConfig, OlmoeConfig, PreTrainedModel

from tests.wrapper.architectures import EXCEPTIONS, small_config, with_opinions

IMAGE, VIDEO, AUDIO, START, PAD = 90, 91, 92, 93, 0
PLACE = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
N_IMAGE = 4  # tokens of an image
ROUNDING = {"rtol": 0.0, "atol": 1e-3}
"""By how much rounding may move a model's logits; a drop moves them 20 times as far."""

Inputs = dict[str, Tensor]


def _qwen_pixels(n_images: int, tokens: Tensor) -> Inputs:
    """Patches in a row, as Qwen's and GLM's processors give them; 2×2 patches become a token."""
    grid = torch.tensor([[1, 4, 4]]).repeat(n_images, 1)
    patches = torch.randn(16 * n_images, 3 * 2 * 4 * 4)
    types = (tokens == IMAGE).int()
    return {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}


def _omni_pixels(n_images: int, tokens: Tensor) -> Inputs:
    inputs = _qwen_pixels(n_images, tokens)
    del inputs["mm_token_type_ids"]  # its forward takes none
    return inputs


def _pixels(n_images: int, _tokens: Tensor) -> Inputs:
    return {"pixel_values": torch.randn(n_images, 3, 8, 8)}


def _aria_pixels(n_images: int, _tokens: Tensor) -> Inputs:
    pixels = torch.randn(n_images, 3, 8, 8)
    return {"pixel_values": pixels, "pixel_mask": torch.ones(n_images, 8, 8, dtype=torch.bool)}


def _gemma_pixels(n_images: int, tokens: Tensor) -> Inputs:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
    return {
        "pixel_values": torch.rand(n_images, 16, 3 * 4 * 4),
        "image_position_ids": places.repeat(n_images, 1, 1),
        "mm_token_type_ids": (tokens == IMAGE).long(),
    }


def _llava() -> LlavaConfig:
    vision = {"hidden_size": 32, "intermediate_size": 48, "image_size": 8, "patch_size": 4}
    return LlavaConfig(
        text_config=small_config(OlmoeConfig, {}),
        vision_config=CLIPVisionConfig(num_hidden_layers=2, num_attention_heads=4, **vision),
        image_token_index=IMAGE,
    )


_VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_DEEP = {"deepstack_visual_indexes": (0,)}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_TEXT = {"text_config": {"rope_parameters": _MROPE}}

_FAMILIES: dict[str, tuple[str, Callable[[int, Tensor], Inputs], dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", _pixels, {}),
    "aria": (
        "AriaForConditionalGeneration",
        _aria_pixels,
        {
            "image_token_index": IMAGE,
            "projector_patch_to_query_dict": {4: N_IMAGE},
            "vision_config": {"image_size": 8, "patch_size": 4},
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        _qwen_pixels,
        PLACE | _TEXT | {"vision_config": {**_VISION, "depth": 2, **_DEEP}},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        _qwen_pixels,
        PLACE | EXCEPTIONS["glm4v_moe"] | {"vision_config": _VISION},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        _qwen_pixels,
        PLACE | {"vision_config": _VISION},
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        _omni_pixels,
        PLACE
        | _TEXT
        | {"vision_start_token_id": START, "audio_start_token_id": START + 1}
        | {"vision_config": _VISION | _DEEP},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        _gemma_pixels,
        PLACE
        | {"text_config": EXCEPTIONS["gemma4"]}
        | {"vision_config": {"pooling_kernel_size": 2, "patch_size": 4}},
    ),
}
"""Of each family the class, what makes its images, and the settings of its small configuration."""

FAMILIES = tuple(_FAMILIES)


def make(family: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny vision-language model of :data:`FAMILIES`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        class_name, _, settings = _FAMILIES[family]
        model_class = getattr(transformers, class_name)
        config_class = model_class.config_class
        return with_opinions(
            model_class(_llava() if family == "llava" else small_config(config_class, settings))
        )


def batch(family: str, images: tuple[int, ...] = (1, 2, 0), *, width: int = 16) -> Inputs:
    """Return a left-padded batch of sequences, each with that many images among its text."""
    generator = torch.Generator().manual_seed(3)
    rows, masks = [], []
    for number, n_images in enumerate(images):
        text = torch.randint(3, 80, (width - 2 * number,), generator=generator)
        for image in range(n_images):
            start = 1 + image * (N_IMAGE + 2)  # with a token before and behind it
            text[start - 1] = START
            text[start : start + N_IMAGE] = IMAGE
        pads = torch.full((width - len(text),), PAD)
        rows.append(torch.cat([pads, text]))
        masks.append(torch.cat([pads, torch.ones_like(text)]))
    tokens = torch.stack(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        pixels = _FAMILIES[family][1](sum(images), tokens) if sum(images) else {}
    return {"input_ids": tokens, "attention_mask": torch.stack(masks), **pixels}


def with_images(version: str) -> str:
    """Return what ``docs/reference/models.md`` says of them in a version of transformers."""
    return f"""\
## With images

Tested with images: {", ".join(f"`{f}`" for f in FAMILIES)}.
Every token of an image is recognised as one, and the modality that is named is dropped first.
`llava` has an OLMoE inside; another language model of this page may stand in its place. No tower
of transformers {version} has MoE layers. `molmoe` is a port of capmoe-zoo, tested there
([MolmoE](image_tasks.md#molmoe-a-port-without-remote-code)). [Images](image_tasks.md) says which
tokens are an image's."""
