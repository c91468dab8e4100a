"""The words of verdicts, and what follows for a claim from several findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

LEVEL: Final = 0.05
"""Family-wise error rate within a claim."""


class Outcome(Enum):
    """The result of one test of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    MIXED = "mixed"
    """It holds on some models and fails on others."""
    PARTLY = "partly"
    """A part of it holds; the rest is undecided."""
    ABSENT = "absent"
    """It could be measured here; the records are missing."""
    IMPOSSIBLE = "impossible"
    """It needs hardware, weights or data that this suite lacks."""


CONFIRMED: Final = "confirmed"
CONTRADICTED: Final = "contradicted"
NOT_SHOWN: Final = "not shown"
NOT_MEASURED: Final = "not measured"
NOT_TESTABLE: Final = "not testable here"
INCONSISTENT: Final = "inconsistent in print"

WORD: Final[Mapping[Outcome, str]] = {
    Outcome.HOLDS: CONFIRMED,
    Outcome.FAILS: CONTRADICTED,
    Outcome.UNDECIDED: NOT_SHOWN,
    Outcome.MIXED: "mixed",
    Outcome.PARTLY: "partly",
    Outcome.ABSENT: NOT_MEASURED,
    Outcome.IMPOSSIBLE: NOT_TESTABLE,
}
"""The word of each outcome."""

WORDS: Final = (CONFIRMED, CONTRADICTED, NOT_SHOWN, INCONSISTENT, NOT_MEASURED, NOT_TESTABLE)
"""Every verdict of the ledger; docs/claims.md says how each is reached."""


@dataclass(frozen=True)
class Finding:
    """One number that was found on a claim, and its outcome.

    Attributes:
        label: What was compared or measured.
        outcome: What it says of the claim.
        effect: The value, in ``unit``; None where it was not measured.
        low: Lower end of its 95 % confidence interval; None where there is none.
        high: Upper end.
        p: Two-sided p, corrected for the contrasts of the claim (Holm); None without a test.
        unit: "points" for accuracies in percent; empty for shares and ratios.
        models: The same for each model alone.
        documents: Number of documents that were compared; 0 where none were.
        records: Paths of the records that it was computed from.
        note: A remark for the reader; may be empty.
    """

    label: str
    outcome: Outcome
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    unit: str = ""
    models: Mapping[str, float] = field(default_factory=dict)
    documents: int = 0
    records: tuple[str, ...] = ()
    note: str = ""


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a claim whose parts must all hold; one that fails refutes it."""
    if Outcome.FAILS in outcomes:
        return Outcome.FAILS
    if outcomes and all(outcome is Outcome.HOLDS for outcome in outcomes):
        return Outcome.HOLDS
    return Outcome.UNDECIDED


def summarize(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what the measured tests of a claim have in common; "mixed" if one of several fails."""
    measured = set(outcomes) - {Outcome.ABSENT}
    if not measured:
        return Outcome.ABSENT
    if len(measured) == 1:
        return measured.pop()
    return Outcome.MIXED if Outcome.FAILS in measured else Outcome.PARTLY


def unanimous(fits: Sequence[bool]) -> Outcome:
    """Return the outcome of what is counted, not sampled: it is true of all, of some or of none."""
    return Outcome.HOLDS if all(fits) else Outcome.MIXED if any(fits) else Outcome.FAILS
