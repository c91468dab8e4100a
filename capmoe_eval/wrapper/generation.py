"""Follow ``generate``: which forward computes the prompt, and the mask of the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """One forward of a generation."""

    first: bool  # it computes the prompt; the other steps compute generated tokens
    # The 2-dimensional mask of prompt and generated tokens, before transformers converts it for a
    # static cache, where pads can no longer be read from it; None if there is none.
    mask: Tensor | None


class Generation:
    """Follows the generations of a model."""

    def __init__(self) -> None:
        self._running = 0
        self._next: Step | None = None

    def take_step(self) -> Step | None:
        """Return the step of the forward that begins now; None outside a generation."""
        step, self._next = self._next, None
        return step

    @contextmanager
    def followed(self, model: Any) -> Iterator[None]:
        """Follow a model's generations; do nothing for a model without ``generate``."""
        with ExitStack() as stack:
            if hasattr(model, "generate"):
                _replace(stack, model, "generate", self._generate)
                _replace(stack, model, "prepare_inputs_for_generation", self._prepare)
            yield

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._running += 1
        try:
            # With a static cache on a GPU transformers would compile the forwards with the hooks.
            return stock(*args, **kwargs | {"disable_compile": True})
        finally:
            self._running -= 1
            self._next = None

    def _prepare(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running:
            # A chunk of a long prompt is a first iteration, too.
            first = bool(kwargs.get("is_first_iteration"))
            self._next = Step(first, kwargs.get("attention_mask"))
        return stock(*args, **kwargs)


def _replace(stack: ExitStack, model: Any, name: str, with_stock: Callable[..., Any]) -> None:
    """Replace a method of one object until the stack closes."""
    stock, own = getattr(model, name), vars(model).get(name)
    setattr(model, name, functools.wraps(stock)(functools.partial(with_stock, stock)))
    if own is None:
        stack.callback(delattr, model, name)
    else:
        stack.callback(setattr, model, name, own)
