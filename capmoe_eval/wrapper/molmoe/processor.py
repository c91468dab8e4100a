"""Turn images and prompts into MolmoE's inputs, by the hub's ``preprocessor_config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    make_nested_list_of_images,
)

from capmoe_eval.wrapper.molmoe.configuration import SPECIAL_TOKENS
from capmoe_eval.wrapper.molmoe.crops import NOWHERE, Crops, Geometry, Marks, cut, shifted

if TYPE_CHECKING:
    from PIL import Image


class MolmoImageProcessor(BaseImageProcessor):
    """The sizes of crops and the statistics of pixels, under the hub's names."""

    model_input_names: ClassVar = ["pixel_values", "image_masks", "image_input_idx"]

    def __init__(
        self,
        max_crops: int = 12,
        overlap_margins: Sequence[int] = (4, 4),
        base_image_input_size: Sequence[int] = (336, 336),
        image_patch_size: int = 14,
        image_mean: Sequence[float] = OPENAI_CLIP_MEAN,
        image_std: Sequence[float] = OPENAI_CLIP_STD,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_crops = max_crops
        self.overlap_margins = list(overlap_margins)
        self.base_image_input_size = list(base_image_input_size)
        self.image_patch_size = image_patch_size
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)

    def crops(self, image: Image.Image, marks: Marks) -> Crops:
        """Return an image's crops and tokens.

        Raises:
            ValueError: If the settings are of crops that are not square or not alike.
        """
        height, width = self.base_image_input_size
        before, after = self.overlap_margins
        side, rest = divmod(height, self.image_patch_size)
        if height != width or before != after or rest or side % 2 or before % 2:
            raise ValueError(
                f"base_image_input_size={self.base_image_input_size}, "
                f"overlap_margins={self.overlap_margins}: crops must be square, of an even number "
                "of patches, with equal and even margins"
            )
        geometry = Geometry(side, before, self.image_patch_size, self.max_crops)
        pixels = np.array(image.convert("RGB"))
        return cut(pixels, geometry, marks, tuple(self.image_mean), tuple(self.image_std))


class MolmoProcessor(ProcessorMixin):
    """MolmoE's images and prompts, each prompt in the form that it was trained with.

    The images of a prompt come first, and the prompt becomes ``User: … Assistant:``.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)
        ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        start, end, patch, column, _ = ids
        self.marks = Marks(start, end, patch, column)
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
        pads = data["attention_mask"].argmax(dim=1).tolist()  # before each prompt
        all_crops = [crops for _, crops in rows]
        if any(all_crops):
            data["pixel_values"] = _filled([[c.patches_NPD for c in row] for row in all_crops], 0)
            data["image_masks"] = _filled([[c.masks_NP for c in row] for row in all_crops], 0)
            places = [
                [shifted(crops.position_NI, before) for crops in row]
                for row, before in zip(all_crops, pads, strict=True)
            ]
            data["image_input_idx"] = _filled(places, NOWHERE)
        return BatchFeature(data)

    def _row(self, prompt: str, images: Sequence[Image.Image]) -> tuple[list[int], list[Crops]]:
        """Return a prompt's tokens, those of its images among them, and its images' crops."""
        if prompt.count(self.image_token) != len(images):
            raise ValueError(
                f"text: {prompt.count(self.image_token)} placeholders {self.image_token} for "
                f"{len(images)} images in {prompt[:60]!r}"
            )
        said = prompt.replace(self.image_token, "").strip()
        words = self.tokenizer.encode(f" User: {said} Assistant:", add_special_tokens=False)
        first = self.tokenizer.bos_token_id
        tokens = [self.tokenizer.eos_token_id if first is None else first]
        all_crops = []
        for image in images:
            crops = self.image_processor.crops(image, self.marks)
            place_NI = shifted(crops.position_NI, len(tokens))
            all_crops.append(dataclasses.replace(crops, position_NI=place_NI))
            tokens += crops.tokens_T
        return tokens + words, all_crops


def _filled(rows: Sequence[list[Tensor]], value: float) -> Tensor:
    """Return the crops of all sequences as one tensor, the shorter sequences filled up."""
    none = next(parts[0] for parts in rows if parts)[:0]
    return pad_sequence(
        [torch.cat([none, *parts]) for parts in rows], batch_first=True, padding_value=value
    )
