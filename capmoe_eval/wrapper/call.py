"""Read the call of a forward: its tokens, its cache, and whether its rows are sequences."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Cache

from capmoe_eval.errors import UsageError

# Shape suffixes: B sequences, S new positions.

_PACKED = (
    "sequences are packed into one row, whose ranks and groups cannot be told; call the model with "
    "a padded batch and its attention_mask"
)


def read_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a forward by name, and its tokens or their embeddings [B, S, …].

    Raises:
        UsageError: If the call has neither ``input_ids`` nor ``inputs_embeds``, or packs sequences.
    """
    arguments = dict(kwargs)
    if args:  # binding takes a while, and `generate` names all of them
        arguments = signature.bind_partial(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
    for name in ("cu_seq_lens_q", "seq_idx"):
        if arguments.get(name) is not None:
            raise UsageError(f"{name}: {_PACKED}")
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            return arguments, arguments[name]
    raise UsageError("model: call it with input_ids or inputs_embeds")


def check_unpacked(position_ids: Any, real_BS: Tensor | None) -> None:
    """Refuse ``position_ids`` by which one row holds several sequences (packing).

    It concerns calls without an ``attention_mask``. As in transformers, another sequence begins
    where a position is not its predecessor plus one. A model of images has positions [3, B, S]; the
    first, in time, stand still within an image and fall only where another sequence begins. Pads,
    which ``real_BS`` marks, begin no sequence.

    Raises:
        UsageError: If a row has several sequences.
    """
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1] < 2:
        return
    if position_ids.ndim == 3:
        begins_BS = position_ids[0].diff(dim=-1) < 0
    else:
        begins_BS = position_ids.diff(dim=-1) != 1
    if real_BS is not None:
        real_BS = real_BS.to(begins_BS.device).bool()
        begins_BS = begins_BS & real_BS[:, 1:] & real_BS[:, :-1]
    if bool(begins_BS.any()):
        raise UsageError(f"position_ids: do not count on within a row: {_PACKED}")


def caches(values: Any) -> dict[Any, Cache]:
    """Return the caches among the arguments or the outputs of a forward, by their names.

    They are known by their type, because a name depends on the version of transformers.
    """
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    return {name: value for name, value in items if isinstance(value, Cache)}


def cached_positions(arguments: Mapping[str, Any]) -> int:
    """Return how many positions the cache of a forward holds; 0 without a cache.

    Raises:
        UsageError: For a filled cache of another kind than transformers', and for several caches
            that differ.
    """
    for name, value in arguments.items():
        if _is_filled(name, value):
            raise UsageError(
                f"{name}: is a filled cache of a kind that transformers does not have "
                f"({type(value).__name__}), so that its positions cannot be told; pass a "
                "DynamicCache of transformers, or another Cache"
            )
    lengths = {name: int(cache.get_seq_length()) for name, cache in caches(arguments).items()}
    filled = {name: length for name, length in lengths.items() if length}
    if len(set(filled.values())) > 1:
        raise UsageError(
            f"{', '.join(filled)}: are caches of {', '.join(map(str, filled.values()))} positions, "
            "so that the sequences' own cannot be told; pass one cache"
        )
    return next(iter(filled.values()), 0)


def _is_filled(name: str, value: Any) -> bool:
    """Return whether an argument is a filled cache of a kind that transformers does not have."""
    if value is None or isinstance(value, (Cache, bool)):
        return False
    if hasattr(value, "get_seq_length"):
        return int(value.get_seq_length()) > 0
    if not isinstance(value, (tuple, list)):
        return name in ("cache", "past_key_values", "cache_params")  # its names so far
    layers = [layer for layer in value if isinstance(layer, (tuple, list)) and layer]
    return any(isinstance(layer[0], Tensor) and layer[0].ndim == 4 for layer in layers)
