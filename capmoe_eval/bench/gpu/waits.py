"""Count where the host waits for its device, and say in which line."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OURS, _STOCK = Path(__file__).parents[2], Path(transformers.__file__).parent
STOCK = "transformers"
"""Stands for every line of the stock model."""

# What needs values, or the number of some values, on the host: on a GPU it waits for all before.
_WAITING = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.nonzero,
    Tensor.masked_select,
    Tensor.equal,
    torch.nonzero,
    torch.masked_select,
    torch.equal,
}


def host_waits(work: Callable[[], object], device: torch.device) -> Counter[str]:
    """Return how often each line makes the host wait while something runs.

    A line is ``wrapper/hook.py:170``, or :data:`STOCK`. On CUDA they are the operations of which
    ``torch.cuda.set_sync_debug_mode`` warns. Elsewhere nothing waits, and those are counted that
    would: values read on the host, sizes that depend on values, and values put on a device; not a
    copy by ``Tensor.to``, which says nothing of where it is from.
    """
    found: Counter[str] = Counter()
    if device.type != "cuda":
        with _Reads(found):
            work()
        return found

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[_place()] += 1

    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


class _Reads(TorchFunctionMode):
    """Counts the calls that would wait for a GPU."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch and note whether it would wait."""
        kwargs = kwargs or {}
        placed = func is torch.tensor and kwargs.get("device") is not None
        masked = func in (Tensor.__getitem__, Tensor.__setitem__) and _has_mask(args[1])
        if func in _WAITING or placed or masked:
            self._found[_place()] += 1
        return func(*args, **kwargs)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _place() -> str:
    """Return the innermost line of ours or of transformers' that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_STOCK):
            return STOCK
        if path.is_relative_to(_OURS) and not path.is_relative_to(_OURS / "bench"):
            return f"{path.relative_to(_OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
