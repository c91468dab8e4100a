"""Cut an image into MolmoE's overlapping crops, and say which token stands for which part of it.

An image is shown twice: whole, shrunk into one crop, and enlarged, as a grid of crops of which
each overlaps its neighbours by ``2 · margin`` patches. A token stands for 2 × 2 patches. Where
crops overlap, each half of the overlap belongs to the crop that has it farther from its edge, so
that the tokens of a grid form one picture, read row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Shape suffixes: X, Y of pixels, N crops, P patches of a crop, D numbers of a patch, I tokens of a
# crop, T tokens of an image with those around it.

NOWHERE = -100
"""Position of a crop's token that stands for nothing: a neighbour has it."""

Pixels = NDArray[np.float32]


@dataclass(frozen=True)
class Geometry:
    """Sizes of crops, in patches unless they say otherwise."""

    crop: int = 24  # of a side
    margin: int = 4  # that a crop gives up on each side where it has a neighbour
    patch: int = 14  # pixels of a side
    max_crops: int = 12  # in the grid

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

    def positions(self, rows: int, columns: int) -> Iterator[NDArray[np.int64]]:
        """Yield for each crop of a grid, row by row, the place of its tokens [I].

        Places are counted over the grid's tokens with one more token behind every row; a token
        that a neighbouring crop has is :data:`NOWHERE`.
        """
        step, side, margin = self.window // 2, self.tokens, self.margin // 2
        stride = step * columns + 2 * margin + 1

        def kept(crop: int, crops: int) -> NDArray[np.bool_]:
            cell = np.arange(side)
            first = 0 if crop == 0 else margin
            last = side if crop == crops - 1 else side - margin
            return (first <= cell) & (cell < last)

        for i in range(rows):
            for j in range(columns):
                row, column = step * i + np.arange(side), step * j + np.arange(side)
                place = row[:, None] * stride + column
                inside = kept(i, rows)[:, None] & kept(j, columns)
                yield np.where(inside, place, NOWHERE).ravel()


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
    """Return the crops of an image.

    Args:
        image: Red, green and blue of its pixels, 0 to 255 [Y, X, 3].
        geometry: The sizes of crops.
        marks: The ids of the tokens.
        mean: Of each colour, which is subtracted.
        std: Of each colour, by which is then divided.
    """
    rows, columns = geometry.tiling(*image.shape[:2])
    colours = np.array([mean, std], dtype=np.float32)
    side, margin, window = geometry.crop, geometry.margin, geometry.window

    def shown(height: int, width: int) -> tuple[Pixels, NDArray[np.bool_]]:
        pixels, inside = _fitted(image, height * geometry.patch, width * geometry.patch)
        return (pixels - colours[0]) / colours[1], inside

    whole, _ = shown(side, side)
    large, inside = shown(window * rows + 2 * margin, window * columns + 2 * margin)
    parts = [
        tuple(
            slice(number * window * geometry.patch, (number * window + side) * geometry.patch)
            for number in (i, j)
        )
        for i in range(rows)
        for j in range(columns)
    ]
    patches = [_patches(whole, geometry), *(_patches(large[part], geometry) for part in parts)]
    masks = [_patches(inside[part][..., None], geometry).mean(axis=-1) for part in parts]
    # MolmoE was trained with the masks one crop too early: the whole image has the first crop's,
    # and the last crop none, which is written −1.
    masks.append(np.full_like(masks[-1], -1))
    first = marks.picture(geometry.tokens, geometry.tokens)
    second = marks.picture(*(window // 2 * n + margin for n in (rows, columns)))
    positions = [
        np.where(place < 0, NOWHERE, place + start)
        for start, grid in ((1, (1, 1)), (len(first) + 1, (rows, columns)))
        for place in geometry.positions(*grid)
    ]
    return Crops(
        torch.from_numpy(np.stack(patches)),
        torch.from_numpy(np.stack(masks)),
        first + second,
        torch.from_numpy(np.stack(positions)),
    )


def _fitted(image: NDArray[np.uint8], height: int, width: int) -> tuple[Pixels, NDArray[np.bool_]]:
    """Return an image, 0 to 1, in the middle of a black canvas, and where on it the image is."""
    scale = min(
        np.float32(wanted) / np.float32(given)
        for wanted, given in zip((height, width), image.shape[:2], strict=True)
    )
    scaled = tuple(int(np.float32(given) * scale) for given in image.shape[:2])
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    pixels = torch.nn.functional.interpolate(
        pixels, scaled, mode="bilinear", align_corners=False, antialias=True
    ).clip(0, 1)
    top, left = (height - scaled[0]) // 2, (width - scaled[1]) // 2
    canvas = np.zeros((height, width, 3), dtype=np.float32)
    inside = np.zeros((height, width), dtype=np.bool_)
    where = (slice(top, top + scaled[0]), slice(left, left + scaled[1]))
    canvas[where] = pixels[0].permute(1, 2, 0).numpy()
    inside[where] = True
    return canvas, inside


def _patches(pixels: NDArray[np.generic], geometry: Geometry) -> Pixels:
    """Return a crop's patches, row by row, each as a row of numbers [P, D]."""
    n, patch = geometry.crop, geometry.patch
    grid = pixels.reshape(n, patch, n, patch, -1).transpose(0, 2, 1, 3, 4)
    return grid.reshape(n * n, -1).astype(np.float32)
