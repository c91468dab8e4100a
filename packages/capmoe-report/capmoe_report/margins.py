"""Margins that follow from printed effects, and the bounds within which an effect must lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from capmoe_eval.experiment.files import read_data
from capmoe_eval.paper.printed import AVERAGE, FIELDS, PrintedRow, Where, find_rows

from capmoe_report.verdicts import Outcome


def pairs(a: Where, b: Where) -> list[tuple[PrintedRow, PrintedRow]]:
    """Pair printed rows of two choices by the fields that neither fixes to one value.

    A row without a γ (Expert Drop, or the baseline beside any γ) pairs with every γ.
    """
    is_open = [
        {f for f in FIELDS if isinstance(where.get(f), list) or f not in {"version", *where}}
        for where in (a, b)
    ]
    shared = is_open[0] & is_open[1]
    if {"Baseline", "Expert Drop"} & {str(a.get("method")), str(b.get("method"))}:
        shared -= {"gamma", "variant"}
    return [
        (row, other)
        for row, other in itertools.product(find_rows(a), find_rows(b))
        if all(getattr(row, f) == getattr(other, f) for f in shared)
    ]


@cache
def margins() -> Mapping[str, Mapping[str, Any]]:
    """Return every margin of ``data/margins.yaml`` by its name.

    Each has ``points`` of accuracy, and ``source``: the printed cells that they follow from. These
    are of the pair of rows that differs least.
    """
    rows = {}
    for margin in read_data(__package__, "data/margins.yaml", tuple[dict[str, Any], ...]):
        share, column = margin["share"], margin.get("column", AVERAGE)
        both = [
            (first, second, first.number(column) / first.point, second.number(column) / first.point)
            for first, second in pairs(margin["first"], margin["second"])
        ]
        first, second, high, low = min(both, key=lambda row: abs(row[2] - row[3]))
        source = f"{first.label} {high:.2f} − {second.method} {low:.2f}"
        if share != 1:
            source = f"{share:g} × ({source}, the smallest printed)"
        elif len(both) > 1:
            source += " (the smallest printed)"
        words = {name: margin[name] for name in ("meaning", "words", "place")}
        # Rounded, so that sums of every version of Python give the same digits.
        points = {"id": margin["id"], "points": round(share * abs(high - low), 12)}
        rows[margin["id"]] = {**points, **words, "source": source}
    return rows


def in_points(bound: float | str) -> float:
    """Return a bound in points: a number, or the name of a margin, with a sign or without."""
    if not isinstance(bound, str):
        return float(bound)
    points = float(margins()[bound.removeprefix("-")]["points"])
    return -points if bound.startswith("-") else points


@dataclass(frozen=True)
class Expectation:
    """The bounds, in points, between which an effect must lie for a claim to hold.

    ``greater`` is (0, ∞), ``less`` (−∞, 0); ``within: 1`` is [−1, 1], ``at_least: -1`` [−1, ∞) and
    ``at_most: -5`` (−∞, −5]. A number may be a margin of ``data/margins.yaml``, ``-gain``.
    """

    low: float
    high: float
    margin: str = ""  # the margin that the bounds are; empty where they are numbers

    @classmethod
    def of(cls, raw: str | Mapping[str, float | str]) -> Expectation:
        """Read an expectation."""
        [(name, value)] = raw.items() if isinstance(raw, Mapping) else [(raw, 0.0)]
        bound = in_points(value)
        bounds = {
            "greater": (0.0, math.inf),
            "less": (-math.inf, 0.0),
            "within": (-bound, bound),
            "at_least": (bound, math.inf),
            "at_most": (-math.inf, bound),
        }
        return cls(*bounds[name], value.removeprefix("-") if isinstance(value, str) else "")

    @property
    def is_direction(self) -> bool:
        """True if it asks for a sign alone, which the test of no difference decides, too."""
        return 0.0 in (self.low, self.high)

    def depth(self, effect: float) -> float:
        """Return how deep within the bounds an effect lies, in points; outside it is negative."""
        return min(effect - self.low, self.high - effect)

    def judge(self, low: float, high: float) -> Outcome:
        """Return what a 95 % interval, in points, says.

        It holds where the whole interval lies within the bounds, fails where it lies outside.
        """
        strictly = self.is_direction and 0.0 in (low, high)
        if low >= self.low and high <= self.high and not strictly:
            return Outcome.HOLDS
        if high < self.low or low > self.high:
            return Outcome.FAILS
        return Outcome.UNDECIDED

    def __str__(self) -> str:
        """Return it as a condition on the effect."""
        if self.is_direction:
            return "> 0" if self.low == 0.0 else "< 0"
        if self.high == math.inf:
            return f"≥ {self.low:+.3g}"
        if self.low == -math.inf:
            return f"≤ {self.high:+.3g}"
        return f"within ±{self.high:.3g}"
