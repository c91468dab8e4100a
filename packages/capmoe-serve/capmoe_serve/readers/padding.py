"""Leave out the rows of expert ids that a server did not record."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from capmoe_eval.errors import UsageError

from capmoe_serve.trace import Array

# Shape suffixes: T tokens, L layers, E experts.


def without_padding(ids: Array) -> tuple[Array, Array, Array, str]:
    """Return expert ids without layers, tokens and places that a server did not record.

    Behind the ids are the numbers of the tokens and of the layers that are left, and in words what
    is not, to follow the source of a trace.

    Servers begin with a buffer of 0 (vLLM, and SGLang's responses) or of −1, and write what a
    router chose. So a layer without an id above 0 has no experts, and a token that is 0 or −1
    throughout was not recorded. Places beyond the model's top-k (SGLang's recorder) are −1.

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
    left = ids if len(layer) == n_layers else ids[:, layer]
    if (lowest := int(ids.min())) < -1:
        raise UsageError(f"expert ids: {lowest} is none; must be at least 0, or -1 for no expert")
    token = np.arange(len(ids))
    if lowest < 0:
        filled = left >= 0
        token, place = (np.flatnonzero(filled.any(axis=axes)) for axes in ((1, 2), (0, 1)))
        left = left[np.ix_(token, np.arange(len(layer)), place)]
    if (is_blank_T := _is_blank(left)).any():
        token, left = token[~is_blank_T], left[~is_blank_T]
    if lowest < 0 and (left < 0).any():
        row, column, _ = np.argwhere(left < 0)[0]
        raise UsageError(
            f"expert ids: token {token[row]} lacks experts (-1) in layer {layer[column]} alone; "
            "only a whole token, layer or place may be -1"
        )
    blank = len(ids) - len(token)
    remark = f"; without {blank:,} token{'s'[: blank > 1]} that recorded no expert" if blank else ""
    return left, token, layer, left_out(np.setdiff1d(np.arange(n_layers), layer)) + remark


def _is_blank(ids: Array) -> Array:
    """Return which tokens are 0 throughout because a server did not record them [T].

    With a top-k of 2 or more all are, since a router chooses an expert once. With 1 it may have
    chosen expert 0 in every layer; an even router does so for one token in E^L. To a router expert
    0 is like any other. So these tokens are blank if there are at least four layers, and if no
    other expert has half as many tokens to itself in every layer.
    """
    is_zero_T: Array = np.logical_not(ids.any(axis=(1, 2)))
    if ids.shape[2] > 1 or not is_zero_T.any():
        return is_zero_T
    constant = ids[(ids == ids[:, :1]).all(axis=(1, 2)), 0, 0]
    tokens_E = np.bincount(constant)
    is_chance = ids.shape[1] < 4 or tokens_E[0] <= 2 * tokens_E[1:].max(initial=0)
    return np.zeros_like(is_zero_T) if is_chance else is_zero_T


def left_out(layers: Iterable[int]) -> str:
    """Return in words which of the model's layers have no experts; empty where all have some."""
    if not (numbers := [str(layer) for layer in layers]):
        return ""
    return (
        f"; without layer{'s'[: len(numbers) > 1]} {', '.join(numbers)}, which recorded no expert"
    )
