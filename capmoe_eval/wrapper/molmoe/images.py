"""Turn images and prompts into MolmoE's inputs, by the hub's ``preprocessor_config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    make_nested_list_of_images,
)

from capmoe_eval.wrapper.molmoe import SPECIAL_TOKENS

if TYPE_CHECKING:
    from PIL import Image

# Shape suffixes: Y, X of pixels (or tokens of a grid), C colours, N crops, P patches of a crop, D
# numbers of a patch, I tokens of a crop, T tokens of an image with those around it.

NOWHERE = -100
"""Position of a crop's token that stands for nothing: a neighbour has it."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of crops, in patches unless they say otherwise."""

    crop: int  # of a side
    margin: int  # that a crop gives up on each side where it has a neighbour
    patch: int  # pixels of a side
    max_crops: int  # in the grid

    @property
    def window(self) -> int:
        """Patches from one crop to the next."""
        return self.crop - 2 * self.margin

    @property
    def tokens(self) -> int:
        """Tokens of a side of a crop."""
        return self.crop // 2

    def tiling(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the grid for an image of that many pixels.

        Of the grids that need no shrinking, the one that enlarges least; if all need it, the one
        that shrinks least. Of equals, the one with fewest crops, then fewest rows.
        """
        most = range(1, self.max_crops + 1)
        grids = [(i, j) for i in most for j in most if i * j <= self.max_crops]
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
        margins = 2 * self.margin * self.patch
        # In float32, as the numbers that it was trained with.
        inner = np.array([height - margins, width - margins], dtype=np.float32)
        sides = (np.array(grids) * self.window * self.patch).astype(np.float32)
        with np.errstate(divide="ignore"):
            scales = (sides / inner).min(axis=1)
        if (scales < 1).all():
            return grids[int(scales.argmax())]
        return grids[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return for each crop of a grid, row by row, the place of its tokens [N, I].

        Places are counted over the grid's tokens with one more token behind every row; a token
        that a neighbouring crop has is :data:`NOWHERE`.
        """
        step, margin = self.window // 2, self.margin // 2
        y, x = (torch.arange(step * n + 2 * margin, device="cpu") for n in (rows, columns))
        row_Y = ((y - margin) // step).clip(0, rows - 1)  # the crop that has each token
        column_X = ((x - margin) // step).clip(0, columns - 1)
        crop_NI = _tiles(row_Y[:, None] * columns + column_X, self.tokens, step).flatten(1)
        place_NI = _tiles(y[:, None] * (len(x) + 1) + x, self.tokens, step).flatten(1)
        number_N = torch.arange(len(crop_NI), device="cpu")
        return place_NI.where(crop_NI == number_N[:, None], NOWHERE)


@dataclass(frozen=True)
class Crops:
    """An image as MolmoE reads it."""

    patches_NPD: Tensor  # the whole image first, then the grid row by row
    masks_NP: Tensor  # share of each patch that is no padding
    tokens_T: list[int]
    position_NI: Tensor  # of each crop's tokens in ``tokens_T``; NOWHERE if negative


@dataclass(frozen=True)
class Marks:
    """Ids of the tokens that an image becomes."""

    start: int
    end: int
    patch: int
    column: int  # behind every row

    def picture(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of a picture of that many tokens."""
        return [self.start, *([self.patch] * columns + [self.column]) * rows, self.end]


def cut(
    image: NDArray[np.uint8],
    geometry: Geometry,
    marks: Marks,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Crops:
    """Return the crops of an image of red, green and blue pixels, 0 to 255 [Y, X, C].

    From each colour, 0 to 1, ``mean`` is subtracted, then it is divided by ``std``.
    """
    rows, columns = geometry.tiling(*image.shape[:2])
    numbers = (torch.tensor(of, dtype=torch.float32, device="cpu") for of in (mean, std))
    mean_C11, std_C11 = (number_C[:, None, None] for number_C in numbers)
    patch, side, step = (n * geometry.patch for n in (1, geometry.crop, geometry.window))

    def shown(height: int, width: int) -> tuple[Tensor, Tensor]:
        pixels_CYX, inside_YX = _fitted(image, height, width)
        return (pixels_CYX - mean_C11) / std_C11, inside_YX

    whole_CYX, _ = shown(side, side)
    large_CYX, inside_YX = shown(*(step * (n - 1) + side for n in (rows, columns)))
    crops_CNYX = torch.cat([whole_CYX[:, None], _tiles(large_CYX, side, step)], dim=1)
    masks_NP = _tiles(_tiles(inside_YX, side, step), patch, patch).flatten(2).mean(dim=2)
    # MolmoE was trained with the masks one crop too early: the whole image has the first crop's,
    # and the last crop none, which is written −1.
    masks_NP = torch.cat([masks_NP, torch.full_like(masks_NP[:1], -1)])
    first = marks.picture(geometry.tokens, geometry.tokens)
    second = marks.picture(*(geometry.window // 2 * n + geometry.margin for n in (rows, columns)))
    positions = [
        shifted(geometry.positions(1, 1), 1),
        shifted(geometry.positions(rows, columns), len(first) + 1),
    ]
    patches_NPD = _tiles(crops_CNYX, patch, patch).movedim(0, -1).flatten(2)
    return Crops(patches_NPD, masks_NP, first + second, torch.cat(positions))


def shifted(position_NI: Tensor, places: int) -> Tensor:
    """Return positions behind so many more tokens; those that are :data:`NOWHERE` stay so."""
    return torch.where(position_NI < 0, position_NI, position_NI + places)


def _fitted(image: NDArray[np.uint8], height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return an image in the middle of a black canvas, 0 to 1 [C, Y, X], and 1 where it is."""
    scale = min(
        np.float32(space) / np.float32(side)
        for space, side in zip((height, width), image.shape[:2], strict=True)
    )
    scaled = tuple(int(np.float32(side) * scale) for side in image.shape[:2])
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
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
        question = prompt.replace(self.image_token, "").strip()
        words = self.tokenizer.encode(f" User: {question} Assistant:", add_special_tokens=False)
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
