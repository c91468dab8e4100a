"""Contrasts: two sides, the expected difference, and what the records say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.margins import in_points
from capmoe_eval.paper.statistics import holm
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome


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
        [(name, given)] = raw.items() if isinstance(raw, Mapping) else [(raw, 0.0)]
        bound = in_points(given)
        bounds = {
            "greater": (0.0, math.inf),
            "less": (-math.inf, 0.0),
            "within": (-bound, bound),
            "at_least": (bound, math.inf),
            "at_most": (-math.inf, bound),
        }
        if name not in bounds:
            raise ValueError(f"expect: {name!r} is none of {', '.join(bounds)}")
        return cls(*bounds[name], given.removeprefix("-") if isinstance(given, str) else "")

    @property
    def is_direction(self) -> bool:
        """True if it asks for a sign alone, which the test of no difference decides, too."""
        return 0.0 in (self.low, self.high)

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


class Contrast(BaseModel):
    """The first side minus the second, over the same documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: Side = Field(alias="a")
    second: Side = Field(alias="b")
    expect: Annotated[Expectation, BeforeValidator(Expectation.of)]  # where the effect must lie
    model: str = ""  # a part of the names of the models that it is asked of; all where it is empty

    def __str__(self) -> str:
        """Return both sides, the batches where they are not lm-eval's, and the model if named."""
        batches = ", mixed batches" if self.first.batches == "mixed" else ""
        model = f", {self.model} alone" if self.model else ""
        return f"{self.first} − {self.second}{batches}{model}"


@cache
def _named() -> dict[str, list[Any]]:
    return read_data(__package__, "data/contrasts.yaml", dict[str, list[Any]])


def read_contrasts(raw: Sequence[str | Mapping[str, Any]]) -> tuple[Contrast, ...]:
    """Return contrasts: each item is one, or the name of a list in ``data/contrasts.yaml``.

    An item that is neither is a ValueError.
    """
    items: list[Any] = []
    for item in raw:
        if isinstance(item, str) and item not in _named():
            raise ValueError(f"contrasts {item!r} are none of {', '.join(_named())}")
        items += _named()[item] if isinstance(item, str) else [item]
    return TypeAdapter(tuple[Contrast, ...]).validate_python(items)


def judge(contrasts: Sequence[Contrast], evidence: Evidence) -> list[Finding]:
    """Return a finding for each contrast of a claim.

    The interval over documents decides. A direction also needs a p below :data:`LEVEL`, corrected
    for the number of directions among the contrasts (Holm).
    """
    effects = [(one, evidence.effect(one.first, one.second, one.model)) for one in contrasts]
    compared = [(one.expect, effect.comparison) for one, effect in effects if effect.comparison]
    corrected = iter(holm([found.p for expect, found in compared if expect.is_direction]))
    findings = []
    for asked, effect in effects:
        found, expect = effect.comparison, asked.expect
        bounds, note = (expect.low, expect.high), evidence.remark(asked.first, asked.second)
        if found is None:
            absent = Finding(str(asked), Outcome.ABSENT, unit="points", bounds=bounds, note=note)
            findings.append(absent)
            continue
        p = next(corrected) if expect.is_direction else None
        decided = expect.judge(found.low, found.high)
        outcome = decided if p is None or p < LEVEL else Outcome.UNDECIDED
        findings.append(
            Finding(
                *(str(asked), outcome, found.effect, found.low, found.high, p, "points"),
                models=effect.models,
                documents=found.documents,
                records=effect.records,
                note=note,
                bounds=bounds,
                wide=effect.wide,
                conditional=effect.wide is None or expect.judge(*effect.wide) is not decided,
            )
        )
    return findings
