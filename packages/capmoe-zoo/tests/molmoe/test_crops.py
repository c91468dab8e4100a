"""How an image is cut into crops, against what each function means."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capmoe_zoo.molmoe import NOWHERE, Geometry, cut

START, END, PATCH, ROW_END = MARKS = (1, 2, 3, 4)
GEOMETRIES = st.builds(
    Geometry,
    crop=st.sampled_from([12, 16, 24]),
    margin=st.sampled_from([2, 4]),
    patch=st.just(2),
    max_crops=st.integers(1, 12),
)


@given(GEOMETRIES, st.integers(1, 4), st.integers(1, 4))
def test_every_token_of_a_grid_is_of_one_crop_that_shows_it(
    geometry: Geometry, rows: int, columns: int
) -> None:
    height = geometry.window // 2 * rows + geometry.margin
    width = geometry.window // 2 * columns + geometry.margin
    holders = {}
    for crop, places in enumerate(geometry.positions(rows, columns)):
        for cell, place in enumerate(places.tolist()):
            if place != NOWHERE:
                assert place not in holders, "two crops have it"
                holders[place] = (crop, cell)
    assert sorted(holders) == [y * (width + 1) + x for y in range(height) for x in range(width)]
    for place, (crop, cell) in holders.items():
        y, x = divmod(place, width + 1)
        i, j = divmod(crop, columns)
        row, column = divmod(cell, geometry.tokens)
        assert (y, x) == (i * geometry.window // 2 + row, j * geometry.window // 2 + column)


@given(GEOMETRIES, st.integers(1, 400), st.integers(1, 400))
def test_the_tiling_enlarges_least_or_shrinks_least(
    geometry: Geometry, height: int, width: int
) -> None:
    margins = 2 * geometry.margin * geometry.patch
    step = geometry.window * geometry.patch
    inner = [np.float32(height - margins), np.float32(width - margins)]
    if 0 in inner:
        return  # any scale is infinite
    best: tuple[float, tuple[int, int]] | None = None
    for crops in range(1, geometry.max_crops + 1):
        for rows in (n for n in range(1, crops + 1) if crops % n == 0):
            grid = (rows, crops // rows)
            scale = min(np.float32(n * step) / side for n, side in zip(grid, inner, strict=True))
            if best is None:
                best = (scale, grid)
            elif best[0] < 1:  # so far all shrink
                best = max(best, (scale, grid), key=lambda grid: grid[0])
            elif 1 <= scale < best[0]:
                best = (scale, grid)
    assert geometry.tiling(height, width) == best[1]


def test_a_crop_shows_its_part_of_the_image() -> None:
    geometry = Geometry(crop=12, margin=2, patch=2, max_crops=4)
    side = 2 * geometry.window + 2 * geometry.margin  # patches of a grid of 2 × 2
    image = np.random.RandomState(0).randint(0, 256, (side * 2, side * 2, 3)).astype(np.uint8)
    crops = cut(image, geometry, MARKS, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert geometry.tiling(*image.shape[:2]) == (2, 2)
    expected = (image / 255 - 0.5) / 0.25
    for number in range(4):
        i, j = divmod(number, 2)
        for patch in range(geometry.crop**2):
            y = 2 * (i * geometry.window + patch // geometry.crop)
            x = 2 * (j * geometry.window + patch % geometry.crop)
            pixels = crops.patches_NPD[1 + number, patch].numpy()
            np.testing.assert_allclose(pixels, expected[y : y + 2, x : x + 2].ravel(), atol=1e-5)
    tokens = np.array(crops.tokens_T)
    placed = crops.position_NI[crops.position_NI >= 0].numpy()
    assert sorted(placed) == np.flatnonzero(tokens == PATCH).tolist()
    assert tokens[[0, -1]].tolist() == [START, END]


def test_padding_is_marked() -> None:
    geometry = Geometry(crop=12, margin=2, patch=2, max_crops=1)
    image = np.full((12, 24, 3), 255, dtype=np.uint8)
    crops = cut(image, geometry, MARKS, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    bright = crops.patches_NPD[1].mean(dim=-1)
    assert 0 < bright.mean() < 1
    np.testing.assert_allclose(crops.masks_NP[0].numpy(), bright.numpy(), atol=1e-6)
    assert (crops.masks_NP[1] == -1).all()
