"""Median and quartiles of a measurement, and its target."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the median and the quartiles of some values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Target:
    """One measured number with its target."""

    name: str
    what: str  # one sentence: what is divided by what
    ratio: Spread  # the measurement, in ``unit``
    target: float | None = None  # the wanted value; None where it is only reported
    at_least: bool = True  # it should be at least that; otherwise at most
    # ``×`` for a ratio, ``share`` for a part of a whole, ``s`` for seconds; empty for a count
    unit: str = "×"
    # The median reaches the target; None where there is none. It follows from the others; a file
    # that says otherwise is wrong.
    met: bool | None = None

    def __post_init__(self) -> None:
        """Compute ``met``; ValueError if it was given and is not what ratio and target say."""
        met = None
        if self.target is not None:
            reached = self.ratio.median
            met = reached >= self.target if self.at_least else reached <= self.target
        if self.met not in (None, met):
            raise ValueError("met is not what ratio and target say")
        object.__setattr__(self, "met", met)

    @property
    def goal(self) -> str | None:
        """The target in its unit; None where it is only reported."""
        if self.target is None:
            return None
        return f"{'≥' if self.at_least else '≤'} {self.shown(self.target)}"

    def shown(self, value: float) -> str:
        """Return a value in the target's unit."""
        if self.unit == "share":
            return f"{100 * value:.2f}\u00a0%"
        digits = {"×": ".3f", "s": ".2f"}.get(self.unit, "g")
        return f"{value:{digits}}\u00a0{self.unit}".rstrip()
