"""How many bytes of tensors a computation holds at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that are allocated inside the block, on any device.

    What a kernel needs beside its outputs, such as a sort's own buffer, is not seen.

    Attributes:
        peak: The most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: set[int] = set()
        self._now = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note the storages that are new."""
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and _key(leaf) not in self._known | given:
                self._follow(leaf)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once while something ran."""
    with LiveBytes() as live:
        work()
    peak: int = live.peak
    return peak


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
