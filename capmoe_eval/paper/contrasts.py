"""Contrasts: two sides, the expected difference, and what the records say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.statistics import holm
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome

MARGIN: Final = 1.0
"""Points of accuracy that a method may lose and still be ``close``."""


@dataclass(frozen=True)
class Expectation:
    """The bounds, in points, between which an effect must lie for a claim to hold.

    ``greater`` is (0, ∞), ``less`` (−∞, 0), ``close`` [−1, ∞); ``within: 1`` is [−1, 1],
    ``at_least: -1`` [−1, ∞) and ``at_most: -5`` (−∞, −5].
    """

    low: float
    high: float

    @classmethod
    def of(cls, raw: str | Mapping[str, float]) -> Expectation:
        """Read an expectation.

        Raises:
            ValueError: If it is none.
        """
        [(name, bound)] = raw.items() if isinstance(raw, Mapping) else [(raw, 0.0)]
        bounds = {
            "greater": (0.0, math.inf),
            "less": (-math.inf, 0.0),
            "close": (-MARGIN, math.inf),
            "within": (-bound, bound),
            "at_least": (bound, math.inf),
            "at_most": (-math.inf, bound),
        }
        if name not in bounds:
            raise ValueError(f"expect: {name!r} is none of {', '.join(bounds)}")
        return cls(*bounds[name])

    @property
    def is_direction(self) -> bool:
        """True if it asks for a sign alone, which the test of no difference decides, too."""
        return 0.0 in (self.low, self.high)

    def judge(self, low: float, high: float, p: float | None = None) -> Outcome:
        """Return what a 95 % interval, in points, says.

        It holds where the whole interval lies within the bounds and fails where it lies outside. A
        direction also needs a corrected p below :data:`LEVEL`.
        """
        if self.is_direction and (p is None or p >= LEVEL):
            return Outcome.UNDECIDED
        if low >= self.low and high <= self.high:
            return Outcome.HOLDS
        if high < self.low or low > self.high:
            return Outcome.FAILS
        return Outcome.UNDECIDED

    def __str__(self) -> str:
        """Return it as a condition on the effect."""
        if self.is_direction:
            return "> 0" if self.low == 0.0 else "< 0"
        if self.high == math.inf:
            return f"≥ {self.low:+g}"
        if self.low == -math.inf:
            return f"≤ {self.high:+g}"
        return f"within ±{self.high:g}"


def _expectation(raw: Any) -> Expectation:
    return raw if isinstance(raw, Expectation) else Expectation.of(raw)


class Contrast(BaseModel):
    """The first side minus the second, over the same documents.

    Attributes:
        label: A name for people; both sides where none is given.
        first: The side whose score is taken, ``a`` in the data.
        second: The side whose score is subtracted, ``b``.
        expect: Where the effect must lie.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str = ""
    first: Side = Field(alias="a")
    second: Side = Field(alias="b")
    expect: Annotated[Expectation, BeforeValidator(_expectation)]

    def __str__(self) -> str:
        """Return the label."""
        return self.label or f"{self.first} − {self.second}"


def judge(
    contrasts: Sequence[Contrast], evidence: Evidence, *, test_margins: bool
) -> list[Finding]:
    """Return a finding for each contrast of a claim.

    Args:
        contrasts: The contrasts of the claim; p is corrected for their number (Holm).
        evidence: The records.
        test_margins: Whether contrasts that ask for a margin, which the interval alone decides,
            have a p and count in its correction.
    """
    effects = [evidence.effect(asked.first, asked.second) for asked in contrasts]
    tested = [
        effect.comparison.p
        for asked, (effect, _) in zip(contrasts, effects, strict=True)
        if effect.comparison and (test_margins or asked.expect.is_direction)
    ]
    corrected = iter(holm(tested))
    findings = []
    for asked, (effect, records) in zip(contrasts, effects, strict=True):
        found = effect.comparison
        if found is None:
            findings.append(Finding(str(asked), Outcome.ABSENT, unit="points"))
            continue
        p = next(corrected) if test_margins or asked.expect.is_direction else None
        outcome = asked.expect.judge(found.low, found.high, p)
        numbers = found.effect, found.low, found.high, p
        findings.append(
            Finding(
                *(str(asked), outcome, *numbers, "points"),
                models=effect.models,
                documents=found.documents,
                records=records,
            )
        )
    return findings
