"""Run the forwards of a model under a capacity one at a time, each counted whole or not at all."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.undo import remembered


class Watcher(Protocol):
    """Sees the forwards of a model."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPlan:
        """Return the plan of the forward that begins."""

    def after_forward(self) -> None:
        """Count the forward that ends, and check it."""

    def no_forward(self) -> None:
        """Note that no forward runs any more."""


@contextmanager
def guarded(model: nn.Module, meter: Meter, watcher: Watcher) -> Iterator[None]:
    """Show a model's forwards to a watcher; restore the model on exit.

    Raises:
        UsageError: On exit, if a forward still runs in another thread.
    """
    before = vars(model).get("forward")  # accelerate sets one, too
    guarded_forward: Any = _GuardedForward(model.forward, meter, watcher)
    model.forward = guarded_forward
    try:
        yield
    finally:
        guarded_forward.close()
        if before is None:
            del model.forward
        else:
            model.forward = before
    if guarded_forward.runs:
        raise UsageError(
            "capacity_aware: the block ended while a forward still ran in another thread, whose "
            "last layers had no capacity; wait for the thread inside the block"
        )


class _GuardedForward:
    """The forward of a model under a capacity, also for those who call it as ``model.forward``."""

    def __init__(self, stock: Callable[..., Any], meter: Meter, watcher: Watcher) -> None:
        functools.update_wrapper(self, stock)
        self._stock, self._meter, self._watcher = stock, meter, watcher
        self._alone = threading.Lock()  # held by the forward that runs
        self._is_closed = False

    @property
    def runs(self) -> bool:
        """True while a forward runs."""
        return self._alone.locked()

    def close(self) -> None:
        """Leave the forwards of those who kept ``model.forward`` to the model."""
        self._is_closed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._stock, memo)  # the copy's own

    # Where a caller is compiled, the hooks are not: they count on the host.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward: no other beside it, and counted whole or not at all."""
        if self._is_closed:
            return self._stock(*args, **kwargs)
        if not self._alone.acquire(blocking=False):
            raise UsageError(
                "capacity_aware: a forward of the model began while another one ran, inside it or "
                "in another thread; run them one after the other, or load the model twice"
            )
        try:
            if self._meter.is_aside:
                self._leave_kernels_alone()
                return self._stock(*args, **kwargs)
            return self._run(args, kwargs)
        finally:
            self._watcher.no_forward()
            self._alone.release()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        undo = [remembered(*self._meter.observers)]
        try:
            plan = self._watcher.before_forward(args, kwargs)
            undo.append(remembered(*(sums for of in plan.observers for sums in of.sums)))
            output = self._stock(*args, **kwargs)
            self._watcher.after_forward()
        except EnforcementError:  # what a broken invariant counted stays: the proofs tell of it
            raise
        except BaseException:
            for take_back in undo:
                take_back()
            raise
        return output

    def _leave_kernels_alone(self) -> None:
        """Have the stock kernels compute all that the routers choose."""
        for layer in self._meter.layers:
            experts: Any = layer.experts
            if hasattr(experts, "capmoe_untouched"):
                experts.capmoe_untouched = True
