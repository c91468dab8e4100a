"""Deal the images of a batch to the processes that have their sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import _slice_mm_encoder_output as rows_of_features

from capmoe_eval.errors import UsageError

# Shape suffixes: B sequences, S positions, I images.

_PIXELS = ("pixel_values", "pixel_mask", "image_sizes", "image_position_ids")
_GRID = "image_grid_thw"  # patches of each image in time, height and width [I, 3]
_FEATURES = "mm_encoder_outputs"  # what `generate` makes of pixels before the first forward
_OTHERS = ("pixel_values_videos", "input_features", "image_input_idx")


def own_images(arguments: dict[str, Any], image_BS: Tensor | None, rows: slice) -> None:
    """Leave in the arguments of a forward the images of some of its sequences, ``rows``.

    The images lie in the order of the sequences: each a row of ``pixel_values``, with as many
    tokens as any other, or as many rows as ``image_grid_thw`` says, with tokens in proportion; or
    each of their tokens a row of features.

    Raises:
        UsageError: For video, sound and MolmoE's crops, and for images that cannot be told apart.
    """
    features = arguments.get(_FEATURES) or {}
    others = [name for name in _OTHERS if arguments.get(name) is not None]
    for name in (*others, *(features.keys() - {"image"})):
        raise UsageError(f"parallel=ep: {name} cannot be dealt to the processes; use parallel=none")
    tokens_B = [0] if image_BS is None else image_BS.sum(dim=1).tolist()
    before = [sum(tokens_B[:number]) for number in (rows.start, rows.stop)]
    if features:
        own = torch.arange(*before)
        arguments[_FEATURES] = (
            {"image": rows_of_features(features["image"], own)} if len(own) else {}
        )
    if arguments.get("pixel_values") is not None:
        _own_pixels(arguments, before, sum(tokens_B))


def _own_pixels(arguments: dict[str, Any], before: list[int], n_tokens: int) -> None:
    """Leave the images between two numbers of image tokens, of ``n_tokens`` in all."""
    pixels, grid_I3 = arguments["pixel_values"], arguments.get(_GRID)
    rows_I = pixels.new_ones(len(pixels)).long() if grid_I3 is None else grid_I3.prod(dim=1)
    starts = [0, *rows_I.cumsum(dim=0).tolist()]  # the first row of each image
    places = [number * starts[-1] for number in before]
    if not n_tokens or any(place % n_tokens or place // n_tokens not in starts for place in places):
        raise UsageError(
            f"parallel=ep: {len(rows_I)} images have {n_tokens} tokens in all, and which sequence "
            "has which of them cannot be told; use parallel=none"
        )
    first, last = (place // n_tokens for place in places)
    own = {name: slice(first, last) for name in _PIXELS}
    own[_GRID] = slice(starts.index(first), starts.index(last))
    for name, part in own.items():
        value = arguments.get(name)
        if isinstance(value, Tensor):
            arguments[name] = value[part] if first < last else None
