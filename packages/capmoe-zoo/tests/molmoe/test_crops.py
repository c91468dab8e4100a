"""How an image is cut into crops, against what each function means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from capmoe_zoo.molmoe import NOWHERE, MolmoImageProcessor

START, END, PATCH, ROW_END = MARKS = (1, 2, 3, 4)


def processor(side: int, margin: int, max_crops: int = 12) -> MolmoImageProcessor:
    """Return a processor of crops of so many patches, each of 2 by 2 pixels."""
    size = (2 * side, 2 * side)
    return MolmoImageProcessor(max_crops, (margin, margin), size, 2, (0.5,) * 3, (0.25,) * 3)


@given(st.sampled_from([12, 16, 24]), st.sampled_from([2, 4]), st.integers(1, 4), st.integers(1, 4))
def test_every_token_of_a_grid_is_of_one_crop_that_shows_it(
    side: int, margin: int, rows: int, columns: int
) -> None:
    step = (side - 2 * margin) // 2
    height, width = (step * n + margin for n in (rows, columns))
    holders = {}
    for crop, places in enumerate(processor(side, margin).positions(rows, columns)):
        for cell, place in enumerate(places.tolist()):
            if place != NOWHERE:
                assert place not in holders, "two crops have it"
                holders[place] = (crop, cell)
    assert sorted(holders) == [y * (width + 1) + x for y in range(height) for x in range(width)]
    for place, (crop, cell) in holders.items():
        i, j = divmod(crop, columns)
        row, column = divmod(cell, side // 2)
        assert divmod(place, width + 1) == (i * step + row, j * step + column)


def test_a_crop_shows_its_part_of_the_image_and_padding_is_marked() -> None:
    # A grid of 2 × 2 crops of 12 patches, each 8 patches behind the last.
    pixels = np.random.RandomState(0).randint(0, 256, (40, 40, 3)).astype(np.uint8)
    crops = processor(12, 2, max_crops=4).crops(Image.fromarray(pixels), MARKS)
    expected = (pixels / 255 - 0.5) / 0.25
    for number in range(4):
        i, j = divmod(number, 2)
        for patch in range(12**2):
            y, x = 2 * (i * 8 + patch // 12), 2 * (j * 8 + patch % 12)
            shown = crops.patches_NPD[1 + number, patch].numpy()
            np.testing.assert_allclose(shown, expected[y : y + 2, x : x + 2].ravel(), atol=1e-5)
    tokens = np.array(crops.tokens_T)
    placed = crops.position_NI[crops.position_NI >= 0].numpy()
    assert sorted(placed) == np.flatnonzero(tokens == PATCH).tolist()
    assert tokens[[0, -1]].tolist() == [START, END]
    assert (tokens == ROW_END).sum() == 6 + 10

    white = Image.new("RGB", (24, 12), (255, 255, 255))
    crops = processor(12, 2, max_crops=1).crops(white, MARKS)
    bright = (crops.patches_NPD[1].mean(dim=-1) + 2) / 4
    assert 0 < bright.mean() < 1
    np.testing.assert_allclose(crops.masks_NP[0].numpy(), bright.numpy(), atol=1e-6)
    assert (crops.masks_NP[1] == -1).all()


def test_crops_that_are_not_square_are_refused() -> None:
    with pytest.raises(ValueError, match="crops must be square"):
        MolmoImageProcessor(base_image_input_size=(336, 322)).sizes()
