"""Follow ``generate``: which forward computes the prompt, its mask, and who has finished."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from capmoe_eval.routing.groups import moved


class Step(NamedTuple):
    """One forward of a generation."""

    first: bool  # it computes the prompt; the other steps compute generated tokens
    # The 2-dimensional mask of prompt and generated tokens, before transformers converts it for a
    # static cache, where pads can no longer be read from it; None if there is none.
    mask: Tensor | None
    # True for a sequence whose answer is finished while others of the batch go on [B]; None where
    # this is not followed. What is computed for it is never read.
    finished_B: Tensor | None = None


class Generation:
    """Follows the generations of a model."""

    def __init__(self, follows_finished: Callable[[], bool]) -> None:
        # Whether the steps of a generation that begins now say which sequences have finished.
        self._follows_finished = follows_finished
        self._running = 0
        self._next: Step | None = None
        self._finished_B: Tensor | None = None

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
                _replace(stack, model, "_get_stopping_criteria", self._criteria)
            yield

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._running += 1
        try:
            # With a static cache on a GPU transformers would compile the forwards with the hooks.
            return stock(*args, **kwargs | {"disable_compile": True})
        finally:
            self._running -= 1
            self._next = self._finished_B = None

    def _prepare(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running:
            # A chunk of a long prompt is a first iteration, too.
            first = bool(kwargs.get("is_first_iteration"))
            self._next = Step(first, kwargs.get("attention_mask"), self._finished_B)
        return stock(*args, **kwargs)

    def _criteria(
        self, stock: Callable[..., Any], generation_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        criteria = stock(generation_config, *args, **kwargs)
        # A beam that finishes leaves the search: those that are computed are live.
        if generation_config.num_beams > 1 or not self._follows_finished():
            return criteria
        return _Followed(criteria, self._finish)

    def _finish(self, done_B: Tensor) -> None:
        before_B = self._finished_B
        self._finished_B = done_B if before_B is None else before_B | done_B


class _Followed(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that tell which sequences they found finished."""

    def __init__(self, criteria: Any, tell: Callable[[Tensor], None]) -> None:
        super().__init__(criteria)
        self._tell = tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done_B = super().__call__(*args, **kwargs)
        told_B = done_B
        # lm-eval's criteria for stop strings stop a batch when all of it is done, but note who is.
        for noted_B in (getattr(criterion, "done_tracker", None) for criterion in self):
            if noted_B is not None:
                told_B = told_B | moved(torch.tensor(noted_B), done_B.device)
        self._tell(told_B)
        return done_B


def _replace(stack: ExitStack, model: Any, name: str, with_stock: Callable[..., Any]) -> None:
    """Replace a method of one object until the stack closes."""
    stock, own = getattr(model, name), vars(model).get(name)
    setattr(model, name, functools.wraps(stock)(functools.partial(with_stock, stock)))
    if own is None:
        stack.callback(delattr, model, name)
    else:
        stack.callback(setattr, model, name, own)
