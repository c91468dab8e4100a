"""Add up what an observer counts of one layer, without waiting for the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor


class Sums:
    """Sums of tensors, and of whole numbers that are known on the host, by their names."""

    def __init__(self) -> None:
        self.forwards = 0  # that were added
        self._sums: Any = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def add(self, **amounts: Tensor | int) -> None:
        """Add to the sums of these names."""
        self._sums.update(amounts)

    def count(self, name: str) -> int:
        """Return a sum; 0 if nothing was added to it."""
        return int(self._sums[name])

    def tensor(self, name: str) -> Tensor:
        """Return a sum of tensors."""
        total: Tensor = self._sums[name]
        return total

    def values(self, name: str) -> list[Any]:
        """Return a sum of tensors as a list; an empty one if nothing was added to it."""
        return self.tensor(name).tolist() if name in self._sums else []
