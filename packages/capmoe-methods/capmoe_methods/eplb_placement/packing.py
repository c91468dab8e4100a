"""Pack items into bins as EPLB does, whose description ``capmoe_serve.placements`` names."""

import numpy as np
from numpy.typing import NDArray

# Shape suffixes: X rows, I items, B bins, N items of a bin.


def pack(load_XI: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """Return the items of each bin [X, B, I/B], equally many, in the order of their packing.

    The heaviest item comes first; it goes to the lightest bin that has space. Where each bin takes
    one item, item i is bin i's, so that nothing moves without a gain.
    """
    rows, items = load_XI.shape
    space = items // bins
    if space == 1:
        return np.tile(np.arange(items)[:, None], (rows, 1, 1))
    row_X = np.arange(rows)
    packed_XBN = np.empty((rows, bins, space), dtype=np.int64)
    weight_XB, filled_XB = np.zeros((rows, bins)), np.zeros((rows, bins), dtype=np.int64)
    for item_X in np.argsort(-load_XI, axis=1, kind="stable").T:
        bin_X = np.where(filled_XB < space, weight_XB, np.inf).argmin(axis=1)
        packed_XBN[row_X, bin_X, filled_XB[row_X, bin_X]] = item_X
        weight_XB[row_X, bin_X] += load_XI[row_X, item_X]
        filled_XB[row_X, bin_X] += 1
    return packed_XBN
