"""Margins that follow from printed effects, and the bounds within which an effect must lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.paper.printed import AVERAGE, PrintedRow
from pydantic import BaseModel, ConfigDict

from capmoe_report.rows import pairs
from capmoe_report.verdicts import Outcome


class Margin(BaseModel):
    """A margin in points of accuracy, derived from effects that the paper prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # its name in an expectation
    meaning: str  # what it decides
    words: str  # the paper's own words for an effect of that kind
    place: str  # where it says so
    first: Mapping[str, Any]  # rows of a printed table
    second: Mapping[str, Any]  # the rows that are subtracted from them
    share: float  # the part of the smallest difference that is the margin
    column: str = AVERAGE  # of the table

    @cached_property
    def _pairs(self) -> list[tuple[PrintedRow, PrintedRow]]:
        """The pairs of printed rows, that which differs least first."""
        return sorted(pairs(self.first, self.second), key=lambda both: abs(self._gap(*both)))

    def _gap(self, first: PrintedRow, second: PrintedRow) -> float:
        return (first.number(self.column) - second.number(self.column)) / first.point

    @property
    def points(self) -> float:
        """The margin, positive."""
        return self.share * abs(self._gap(*self._pairs[0]))

    @property
    def source(self) -> str:
        """The printed cells that it follows from, and how."""
        first, second = self._pairs[0]
        high, low = (row.number(self.column) / row.point for row in (first, second))
        text = f"{first.label} {high:.2f} − {second.method} {low:.2f}"
        if self.share != 1:
            return f"{self.share:g} × ({text}, the smallest printed)"
        return f"{text} (the smallest printed)" if len(self._pairs) > 1 else text


@cache
def margins() -> Mapping[str, Margin]:
    """Return every margin of ``data/margins.yaml`` by its name."""
    rows = read_data(__package__, "data/margins.yaml", tuple[Margin, ...])
    return {margin.id: margin for margin in rows}


def written_margins(claims: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return every margin as it is written, with the ids of those claims that it judges."""
    return tuple(
        {
            **{"id": name, "points": round(margin.points, 5), "meaning": margin.meaning},
            **{"words": margin.words, "place": margin.place, "source": margin.source},
            "claims": [c.id for c in claims if name in {x.expect.margin for x in c.contrasts}],
        }
        for name, margin in margins().items()
    )


def in_points(bound: float | str) -> float:
    """Return a bound in points: a number, or the name of a margin, with a sign or without.

    A name that no margin has is a ValueError.
    """
    if not isinstance(bound, str):
        return float(bound)
    name = bound.removeprefix("-")
    if name not in margins():
        raise ValueError(f"margin {name!r} is none of {', '.join(margins())}")
    return -margins()[name].points if bound.startswith("-") else margins()[name].points


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
        """Read an expectation, or raise ValueError."""
        [(name, value)] = raw.items() if isinstance(raw, Mapping) else [(raw, 0.0)]
        bound = in_points(value)
        bounds = {
            "greater": (0.0, math.inf),
            "less": (-math.inf, 0.0),
            "within": (-bound, bound),
            "at_least": (bound, math.inf),
            "at_most": (-math.inf, bound),
        }
        if name not in bounds:
            raise ValueError(f"expect: {name!r} is none of {', '.join(bounds)}")
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
