"""The bytes of tensors and arrays while something runs."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that were alive at once while something ran.

    Storages that existed before do not count. What a kernel needs beside its outputs, such as a
    sort's own buffer, is not seen. On a CPU, the most bytes of NumPy arrays and Python objects in
    another run are added; the two peaks may differ in time.
    """
    with _LiveBytes() as live:
        work()
    peak: int = live.peak
    if device.type == "cpu":
        tracemalloc.start()
        work()
        peak += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that are allocated inside the block, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages that are new."""
        result = func(*args, **(kwargs or {}))
        self._alive |= _storages(result) - _storages((args, kwargs))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return result


def _storages(values: object) -> set[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {leaf.untyped_storage() for leaf in leaves}
