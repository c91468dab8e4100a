"""Cut an image into MolmoE's overlapping crops, and say which token stands for which part of it.

An image is shown twice: whole, shrunk into one crop, and enlarged, as a grid of crops of which
each overlaps its neighbours by ``2 · margin`` patches. A token stands for 2 × 2 patches. Where
crops overlap, each half of the overlap belongs to the crop that has it farther from its edge, so
that the tokens of a grid form one picture, read row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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
        y, x = (torch.arange(step * n + 2 * margin) for n in (rows, columns))
        row_Y = ((y - margin) // step).clip(0, rows - 1)  # the crop that has each token
        column_X = ((x - margin) // step).clip(0, columns - 1)
        crop_NI = _tiles(row_Y[:, None] * columns + column_X, self.tokens, step).flatten(1)
        place_NI = _tiles(y[:, None] * (len(x) + 1) + x, self.tokens, step).flatten(1)
        return place_NI.where(crop_NI == torch.arange(len(crop_NI))[:, None], NOWHERE)


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
    mean_C11, std_C11 = (torch.tensor(of)[:, None, None] for of in (mean, std))
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
        np.float32(wanted) / np.float32(given)
        for wanted, given in zip((height, width), image.shape[:2], strict=True)
    )
    scaled = tuple(int(np.float32(given) * scale) for given in image.shape[:2])
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    pixels = nn.functional.interpolate(
        pixels, scaled, mode="bilinear", align_corners=False, antialias=True
    )
    top, left = (height - scaled[0]) // 2, (width - scaled[1]) // 2
    around = (left, width - scaled[1] - left, top, height - scaled[0] - top)
    return (
        nn.functional.pad(pixels[0].clip(0, 1), around),
        nn.functional.pad(torch.ones(scaled), around),
    )


def _tiles(picture: Tensor, side: int, step: int) -> Tensor:
    """Return the squares of a picture […, Y, X] that begin every ``step`` […, N, side, side]."""
    return picture.unfold(-2, side, step).unfold(-2, side, step).flatten(-4, -3)
