"""What a model's forward is called with."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from capmoe_eval.errors import UsageError


def read_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a forward by name, and its tokens or their embeddings [B, S, …].

    Args:
        signature: Of the model's forward.
        args: Its positional arguments.
        kwargs: Its arguments by name.

    Raises:
        UsageError: If it gets neither ``input_ids`` nor ``inputs_embeds``.
    """
    given = signature.bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    if tokens is None:
        raise UsageError("model: call it with input_ids or inputs_embeds")
    return given, tokens
