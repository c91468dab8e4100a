"""Remove from expert ids [T, L, K] what a server left at -1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.serving.trace import Array


class Filled(NamedTuple):
    """The part of an array of expert ids that holds experts."""

    ids: Array  # [T, L, K], all at least 0
    token: Array  # which rows of the array are left [T]
    layer: Array  # which layers of it are left [L]


def without_padding(ids: Array) -> Filled:
    """Return expert ids without the tokens, layers and places that are -1 throughout.

    Servers leave -1 for tokens that they did not compute (vLLM: a cached prefix), for layers
    without experts, and for places beyond the model's top-k (SGLang).

    Raises:
        UsageError: If nothing is left, or a token lacks some of its experts.
    """
    if ids.size and ids.min() >= 0:
        return Filled(ids, *map(np.arange, ids.shape[:2]))
    filled = ids >= 0
    token = np.flatnonzero(filled.any(axis=(1, 2)))
    layer = np.flatnonzero(filled.any(axis=(0, 2)))
    place = np.flatnonzero(filled.any(axis=(0, 1)))
    left = ids[np.ix_(token, layer, place)]
    if not left.size:
        raise UsageError("expert ids: all are -1; no token was recorded")
    if (left < 0).any():
        row, column, _ = np.argwhere(left < 0)[0]
        raise UsageError(
            f"expert ids: token {token[row]} lacks experts (-1) in layer {layer[column]} alone; "
            "only a whole token, layer or place may be -1"
        )
    return Filled(left, token, layer)
