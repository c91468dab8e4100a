"""Seeded choices that are the same in every version of Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Draw:
    """A stream of choices.

    Only ``random.Random.random`` is promised to keep its sequence between versions of Python;
    ``choice`` and ``shuffle`` are not.

    Args:
        seed: Any text; equal texts give equal streams.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, stop: int) -> int:
        """Return an integer from 0 to ``stop - 1``."""
        return int(self._random() * stop)

    def chance(self, probability: float) -> bool:
        """Return True with that probability."""
        return self._random() < probability

    def one(self, items: Sequence[_T]) -> _T:
        """Return one item."""
        return items[self.below(len(items))]

    def one_of(self, items: Sequence[_T], weights: Sequence[float]) -> _T:
        """Return one item, drawn in proportion to the weights."""
        rest = self._random() * sum(weights)
        for item, weight in zip(items, weights, strict=True):
            rest -= weight
            if rest < 0:
                return item
        return items[-1]

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return all items in a random order."""
        return sorted(items, key=lambda _: self._random())

    def some(self, items: Sequence[_T], count: int) -> list[_T]:
        """Return ``count`` different items (all, if there are fewer)."""
        return self.shuffled(items)[:count]
