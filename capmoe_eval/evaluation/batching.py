"""Deal requests into batches at random.

lm-eval sorts requests by length, so that a batch holds questions of one length. Dealt at random,
the same requests share their batches, and with them a capacity, with other requests.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence


def deal(keys: Sequence[Hashable], size: int, seed: int) -> list[list[int]]:
    """Return random batches of ``size`` rows, each with the indices of its requests.

    Requests with equal keys share one row. Equal seeds deal equal keys equally.
    """
    rows: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    draw = random.Random(seed).random  # the one method whose sequence Python promises to keep
    dealt = sorted(rows.values(), key=lambda _: draw())
    batches = [dealt[start : start + size] for start in range(0, len(dealt), size)]
    return [[index for row in batch for index in row] for batch in batches]
