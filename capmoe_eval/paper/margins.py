"""Margins in points of accuracy, each derived from effects that the paper prints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.paper.printed import AVERAGE, PrintedRow, pairs


class Margin(BaseModel):
    """One margin of ``data/margins.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # its name in an expectation
    meaning: str  # what it decides
    words: str  # the paper's own words for an effect of that kind
    place: str  # where it says so
    first: Mapping[str, Any]  # rows of a printed table
    second: Mapping[str, Any]  # the rows that are subtracted from them
    share: float  # the part of the smallest difference that is the margin
    column: str = AVERAGE  # of the table

    @property
    def _pair(self) -> tuple[PrintedRow, PrintedRow]:
        """The two printed rows that differ least."""
        found = pairs(self.first, self.second)
        return min(found, key=lambda rows: abs(self._gap(*rows)))

    @property
    def points(self) -> float:
        """The margin, positive."""
        return self.share * abs(self._gap(*self._pair))

    def _gap(self, first: PrintedRow, second: PrintedRow) -> float:
        return (first.number(self.column) - second.number(self.column)) / first.point

    @property
    def source(self) -> str:
        """The printed cells that it follows from, and how."""
        first, second = self._pair
        high, low = (row.number(self.column) / row.point for row in (first, second))
        text = f"{first.label} {high:.2f} − {second.method} {low:.2f}"
        if self.share != 1:
            return f"{self.share:g} × ({text}, the smallest printed)"
        several = len(pairs(self.first, self.second)) > 1
        return f"{text} (the smallest printed)" if several else text


@cache
def margins() -> Mapping[str, Margin]:
    """Return every margin by its name."""
    found = read_data(__package__, "data/margins.yaml", tuple[Margin, ...])
    return {margin.id: margin for margin in found}


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
