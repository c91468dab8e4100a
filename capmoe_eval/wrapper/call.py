"""Read the arguments that a model's forward is called with."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from capmoe_eval.errors import UsageError

# Shape suffixes: B sequences, S new positions, M columns of a mask over cache and new positions.


def read_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a forward by name, and its tokens or their embeddings [B, S, …].

    Raises:
        UsageError: If the call has neither ``input_ids`` nor ``inputs_embeds``.
    """
    arguments = signature.bind_partial(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    tokens = arguments.get("input_ids")
    if tokens is None:
        tokens = arguments.get("inputs_embeds")
    if tokens is None:
        raise UsageError("model: call it with input_ids or inputs_embeds")
    return arguments, tokens


def new_columns(mask: Any, tokens: Tensor, n_cached: int) -> Tensor:
    """Return a boolean mask [B, S] of the new tokens that an attention mask marks as real.

    As in transformers, column j of the mask is position j of a sequence, cached positions first.
    The mask may be longer than the cached and new tokens (a static cache), but not shorter.

    Args:
        mask: The mask [B, M], M ≥ n_cached + S.
        tokens: The new tokens [B, S] or their embeddings.
        n_cached: Positions in the cache.

    Raises:
        UsageError: If the mask is not a 2-dimensional tensor that covers the tokens.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UsageError(
            "attention_mask: a capacity needs the 2-dimensional mask to know the pads; pass that, "
            "or say them with meter.real_tokens(mask)"
        )
    n_sequences, n_new = tokens.shape[:2]
    end = n_cached + n_new
    if len(mask) != n_sequences or mask.shape[1] < end:
        raise UsageError(
            f"attention_mask: its shape {tuple(mask.shape)} does not cover {n_sequences} sequences "
            f"of {n_cached} cached and {n_new} new tokens; pass ({n_sequences}, {end})"
        )
    return mask[:, n_cached:end].bool()
