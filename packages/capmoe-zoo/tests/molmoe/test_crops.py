"""Which crop of a grid has which token; ``test_parity.py`` compares what a crop shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capmoe_zoo.molmoe import NOWHERE, MolmoImageProcessor


@given(st.sampled_from([12, 16, 24]), st.sampled_from([2, 4]), st.integers(1, 4), st.integers(1, 4))
def test_every_token_of_a_grid_is_of_one_crop_that_shows_it(
    side: int, margin: int, rows: int, columns: int
) -> None:
    step = (side - 2 * margin) // 2
    height, width = (step * n + margin for n in (rows, columns))
    processor = MolmoImageProcessor(
        overlap_margins=(margin, margin), base_image_input_size=(14 * side, 14 * side)
    )
    holders = {}
    for crop, places in enumerate(processor.positions(rows, columns)):
        for cell, place in enumerate(places.tolist()):
            if place != NOWHERE:
                assert place not in holders, "two crops have it"
                holders[place] = (crop, cell)
    assert sorted(holders) == [y * (width + 1) + x for y in range(height) for x in range(width)]
    for place, (crop, cell) in holders.items():
        i, j = divmod(crop, columns)
        row, column = divmod(cell, side // 2)
        assert divmod(place, width + 1) == (i * step + row, j * step + column)
