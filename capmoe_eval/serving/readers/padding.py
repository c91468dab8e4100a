"""Remove from expert ids [T, L, K] what a server did not record."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.serving.trace import Array


class Recorded(NamedTuple):
    """The part of an array of expert ids that holds experts."""

    ids: Array  # [T, L, K], all at least 0
    token: Array  # which rows of the array are left [T]
    layer: Array  # which layers of it are left [L]
    remark: str  # which layers were left out, to follow the source of a trace; empty if none


def without_padding(ids: Array) -> Recorded:
    """Return expert ids without layers, tokens and places that a server did not record.

    Servers begin with a buffer of 0 (vLLM, and SGLang's responses) or of −1, and write the layers
    that have a router. So a layer without an id above 0 has no experts. Tokens that were not
    computed (vLLM: a cached prefix) and places beyond the model's top-k (SGLang) are −1.

    Raises:
        UsageError: If nothing is left, or a token lacks some of its experts.
    """
    n_layers = ids.shape[1]
    highest_L = ids.max(axis=0).max(axis=1) if ids.size else np.zeros(n_layers)
    layer = np.flatnonzero(highest_L > 0)
    if not len(layer):
        raise UsageError(
            "expert ids: all are 0 or -1, so that the server recorded no expert; its MoE kernel "
            "may not record them: serve with another MoE backend, or a newer version"
        )
    remark = left_out(layer, n_layers)
    left = ids if len(layer) == n_layers else ids[:, layer]
    if (lowest := int(left.min())) >= 0:
        return Recorded(left, np.arange(len(ids)), layer, remark)
    if lowest < -1:
        raise UsageError(f"expert ids: {lowest} is none; must be at least 0, or -1 for no expert")
    filled = left >= 0
    token, place = (np.flatnonzero(filled.any(axis=axes)) for axes in ((1, 2), (0, 1)))
    left = left[np.ix_(token, np.arange(len(layer)), place)]
    if (left < 0).any():
        row, column, _ = np.argwhere(left < 0)[0]
        raise UsageError(
            f"expert ids: token {token[row]} lacks experts (-1) in layer {layer[column]} alone; "
            "only a whole token, layer or place may be -1"
        )
    return Recorded(left, token, layer, remark)


def left_out(layer: Array, n_layers: int) -> str:
    """Return in words which of the model's layers have no experts; empty where all have some."""
    if len(layer) == n_layers:
        return ""
    others = np.setdiff1d(np.arange(n_layers), layer)
    numbers = ", ".join(map(str, others))
    return f"; without layer{'s'[: len(others) > 1]} {numbers}, which recorded no expert"
