"""Make seeded random choices that are the same in every version of Python."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Draw:
    """A stream of random choices; equal seeds, which are any text, give equal streams.

    It uses ``random.Random.random`` alone, the only method whose sequence Python guarantees across
    versions.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, stop: int) -> int:
        """Return an integer from 0 to ``stop - 1``."""
        return int(self._random() * stop)

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self._random() < probability

    def one(self, items: Sequence[_T]) -> _T:
        """Return a random item."""
        return items[self.below(len(items))]

    def early(self, items: Sequence[_T], spread: float) -> _T:
        """Return a random item; the first is ``spread`` times as likely as the last."""
        place = -math.log(1 - self._random() * (1 - 1 / spread)) / math.log(spread)
        return items[min(int(place * len(items)), len(items) - 1)]

    def one_of(self, items: Sequence[_T], weights: Sequence[float]) -> _T:
        """Return a random item, drawn in proportion to the weights."""
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
        """Return ``count`` different random items (all, if there are fewer)."""
        return self.shuffled(items)[:count]
