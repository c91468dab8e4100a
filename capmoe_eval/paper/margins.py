"""Margins in points of accuracy, each derived from effects that the paper prints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from capmoe_eval.paper.printed import PrintedRow, pairs

FIXED: Final = "These margins are fixed before the new models are evaluated."
"""The heading of every table of margins."""


class Margin(BaseModel):
    """One margin of ``data/margins.yaml``.

    Attributes:
        id: Its name in an expectation.
        meaning: What it decides.
        words: The paper's own words for an effect of that kind.
        place: Where it says so.
        first: Rows of a printed table.
        second: The rows that are subtracted from them.
        share: The part of the smallest difference that is the margin.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    meaning: str
    words: str
    place: str
    first: Mapping[str, Any]
    second: Mapping[str, Any]
    share: float

    @property
    def _pair(self) -> tuple[PrintedRow, PrintedRow]:
        """The two printed rows that differ least."""
        found = pairs(self.first, self.second)
        return min(found, key=lambda rows: abs(rows[0].mean - rows[1].mean))

    @property
    def points(self) -> float:
        """The margin, positive."""
        first, second = self._pair
        return self.share * abs(first.mean - second.mean)

    @property
    def source(self) -> str:
        """The printed cells that it follows from, and how."""
        first, second = self._pair
        text = f"{first.label} {first.mean:.2f} − {second.method} {second.mean:.2f}"
        return text if self.share == 1 else f"{self.share:g} × ({text}, the smallest printed)"


@cache
def margins() -> Mapping[str, Margin]:
    """Return every margin by its name."""
    text = (resources.files(__package__) / "data" / "margins.yaml").read_text(encoding="utf-8")
    found = TypeAdapter(tuple[Margin, ...]).validate_python(yaml.safe_load(text))
    return {margin.id: margin for margin in found}


def in_points(bound: float | str) -> float:
    """Return a bound in points: a number, or the name of a margin with a sign or without.

    Raises:
        ValueError: If there is no such margin.
    """
    if not isinstance(bound, str):
        return float(bound)
    name = bound.removeprefix("-")
    if name not in margins():
        raise ValueError(f"margin {name!r} is none of {', '.join(margins())}")
    return -margins()[name].points if bound.startswith("-") else margins()[name].points
