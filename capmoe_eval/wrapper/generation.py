"""Follow ``generate``: which forwards compute the prompt, its mask, and who has finished.

transformers looks its decoding loops up in their class whenever ``generate`` runs. They are
followed there while a block is open, so that it does not matter which object generates: the model
itself, one that contains it, or a ``generate`` that was bound before the block.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.continuous_batching import ContinuousMixin

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import moved


@dataclass(eq=False)
class Decoding:
    """One generation that runs in one thread."""

    # True while the prompt is computed, False behind it; None before.
    first: bool | None = None
    # The 2-dimensional mask of the prompt while it is computed, before transformers converts it for
    # a static cache, where pads can no longer be read from it; None if there is none.
    mask: Tensor | None = None
    # True for a sequence whose answer is finished while others of the batch go on [B]; None where
    # this is not followed. What is computed for it is never read.
    finished_B: Tensor | None = None
    prompt_length: int = 0  # positions of the prompt that are computed so far
    is_paused: bool = False  # True while a logits processor or a stopping criterion runs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Mark the forwards of a ``with`` block as no steps of this generation."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class Generation:
    """Follows the generations of a model, and of objects that contain it."""

    def __init__(self, model: nn.Module, follows_finished: Callable[[], bool]) -> None:
        self._model = model
        # Whether the steps of a generation that begins now say which sequences have finished.
        self._follows_finished = follows_finished
        self._local = threading.local()  # `decoding`: the generation that this thread runs
        self._n_running = 0  # generations, of all threads

    def step(self) -> Decoding | None:
        """Return the generation whose forward begins now in this thread; None outside of any.

        Raises:
            UsageError: If a generation runs whose steps cannot be told.
        """
        decoding = self._running()
        if decoding is not None and decoding.first is not None and not decoding.is_paused:
            return decoding
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _GENERATE and self.concerns(frame.f_locals.get("self")):
                raise UsageError(
                    "generate: it runs the model in forwards that are not the steps of greedy "
                    "search, sampling or beam search (a custom_generate, guidance_scale, or a loop "
                    "of the model's own), so that prompts cannot be told from steps; leave that "
                    "option out, or call the model in a loop of your own"
                )
            frame = frame.f_back
        return None

    def _running(self) -> Decoding | None:
        return getattr(self._local, "decoding", None)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the generations that begin in a ``with`` block.

        Raises:
            UsageError: On exit, if one of them still runs in another thread.
        """
        with _LOCK:
            if not _OPEN:
                for (owner, name), follow in _LOOPS.items():
                    stock = _STOCK[owner, name] = getattr(owner, name)
                    setattr(owner, name, _followed(stock, follow))
            _OPEN.append(self)
        try:
            yield
        finally:
            with _LOCK:
                _OPEN.remove(self)
                while _STOCK and not _OPEN:
                    (owner, name), stock = _STOCK.popitem()
                    setattr(owner, name, stock)
        if self._n_running:
            raise UsageError(
                "capacity_aware: the block ended while generate still ran in another thread, whose "
                "last steps have no capacity; wait for the thread inside the block"
            )

    def concerns(self, generating: Any) -> bool:
        """Return whether an object that generates is the model, or contains it."""
        return isinstance(generating, nn.Module) and any(
            module is self._model for module in generating.modules()
        )

    @contextmanager
    def decoding(self, loop: str, arguments: dict[str, Any]) -> Iterator[None]:
        """Follow one decoding loop, whose arguments are replaced in place.

        Raises:
            UsageError: If the loop verifies drafts, or makes them.
        """
        options = arguments["generation_config"] = copy.copy(arguments["generation_config"])
        if loop == "_assisted_decoding" or options.is_assistant:
            raise UsageError(
                "generate: assisted decoding (assistant_model, prompt_lookup_num_tokens, use_mtp, "
                "assistant_early_exit) is not supported under a capacity, because drafted tokens "
                "would take slots of the prompt's forward; leave it out"
            )
        # With a static cache on a GPU transformers would compile the forwards with the hooks.
        options.disable_compile = True
        before, decoding = self._running(), Decoding()
        arguments["logits_processor"] = _Processors(arguments["logits_processor"], decoding)
        # A beam that finishes leaves the search: those that are computed are live.
        follows = loop == "_sample" and self._follows_finished()
        arguments["stopping_criteria"] = _Criteria(
            arguments["stopping_criteria"], decoding, follows=follows
        )
        self._local.decoding = decoding
        with _LOCK:
            self._n_running += 1
        try:
            yield
        finally:
            self._local.decoding = before
            with _LOCK:
                self._n_running -= 1

    @contextmanager
    def prompt(self, _loop: str, arguments: dict[str, Any]) -> Iterator[None]:
        """Follow the forwards that compute a prompt, several where it is computed in chunks."""
        decoding = self._running()
        if decoding is None:  # a loop that is not followed
            yield
            return
        decoding.first, decoding.mask = True, arguments["model_kwargs"].get("attention_mask")
        try:
            yield
        finally:
            decoding.first, decoding.mask = False, None

    def packing(self, _loop: str, _arguments: dict[str, Any]) -> AbstractContextManager[None]:
        """Refuse the start of continuous batching.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "generate_batch: continuous batching packs sequences into one row, so that neither "
            "prompts nor ranks can be told; use generate"
        )


class _Processors(LogitsProcessorList):  # type: ignore[misc]
    """Logits processors whose own forwards are no steps."""

    def __init__(self, processors: Any, decoding: Decoding) -> None:
        super().__init__(processors)
        self._decoding = decoding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._decoding.paused():
            return super().__call__(*args, **kwargs)


class _Criteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that note which sequences have finished."""

    def __init__(self, criteria: Any, decoding: Decoding, *, follows: bool) -> None:
        super().__init__(criteria)
        self._decoding, self._follows = decoding, follows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._decoding.paused():
            done_B = super().__call__(*args, **kwargs)
        if self._follows:
            noted_B = done_B
            # lm-eval's criteria for stop strings stop a batch when all of it is done, but note who
            # is.
            for tracked in (getattr(criterion, "done_tracker", None) for criterion in self):
                if tracked is not None:
                    tracked_B = torch.tensor(tracked, device="cpu")
                    noted_B = noted_B | moved(tracked_B, done_B.device)
            before_B = self._decoding.finished_B
            self._decoding.finished_B = noted_B if before_B is None else before_B | noted_B
        return done_B


_LOCK = threading.Lock()
_OPEN: list[Generation] = []
"""What follows generations now, of all threads."""

_LOOPS = {
    (GenerationMixin, "_sample"): Generation.decoding,
    (GenerationMixin, "_beam_search"): Generation.decoding,
    (GenerationMixin, "_assisted_decoding"): Generation.decoding,
    (GenerationMixin, "_prefill"): Generation.prompt,
    (ContinuousMixin, "init_continuous_batching"): Generation.packing,
}
_STOCK: dict[tuple[type, str], Any] = {}
"""The methods that are replaced while something follows generations."""

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def _followed(stock: Any, follow: Any) -> Callable[..., Any]:
    """Return transformers' function, wrapped so that open blocks follow or refuse it."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def loop(generating: Any, *args: Any, **kwargs: Any) -> Any:
        concerned = [generation for generation in list(_OPEN) if generation.concerns(generating)]
        if not concerned:
            return stock(generating, *args, **kwargs)
        call = signature.bind(generating, *args, **kwargs)
        with ExitStack() as stack:
            for generation in concerned:
                stack.enter_context(follow(generation, stock.__name__, call.arguments))
            return stock(*call.args, **call.kwargs)

    return loop
