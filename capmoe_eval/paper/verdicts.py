"""The words of verdicts, and what follows for a claim from several findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

LEVEL: Final = 0.05
"""Family-wise error rate within a claim."""

BEYOND: Final = 1.96
"""Standard errors at which a normal difference is significant at that level."""


class Outcome(Enum):
    """The result of one test of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    MIXED = "mixed"
    """It holds on some models and fails on others; of a claim, this decides nothing."""
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
ONLY_HERE: Final = "on these models"
"""The scope of a verdict that holds for these models and batches, and is not shown for others."""

WORD: Final[Mapping[Outcome, str]] = {
    Outcome.HOLDS: CONFIRMED,
    Outcome.FAILS: CONTRADICTED,
    Outcome.UNDECIDED: NOT_SHOWN,
    Outcome.MIXED: "mixed",
    Outcome.ABSENT: NOT_MEASURED,
    Outcome.IMPOSSIBLE: NOT_TESTABLE,
}
"""The word of each outcome."""

WORDS: Final = (CONFIRMED, CONTRADICTED, NOT_SHOWN, INCONSISTENT, NOT_MEASURED, NOT_TESTABLE)
"""Every verdict of the ledger; docs/claims.md says how each is reached."""


@dataclass(frozen=True)
class Finding:
    """One number that was found on a claim, and its outcome."""

    label: str  # what was compared or measured
    outcome: Outcome  # what it says of the claim
    effect: float | None = None  # the value, in ``unit``; None where it was not measured
    low: float | None = None  # of its 95 % confidence interval over documents, if it has one
    high: float | None = None
    p: float | None = None  # two-sided, corrected for the contrasts of the claim (Holm), if tested
    unit: str = ""  # "points" for accuracies in percent; empty for shares and ratios
    models: Mapping[str, float] = field(default_factory=dict)  # the effect on each model alone
    documents: int = 0  # number of documents that were compared
    records: tuple[str, ...] = ()  # paths of the records that it was computed from
    note: str = ""  # a remark for the reader
    bounds: tuple[float, float] | None = None  # where the effect must lie; ``inf``: no bound
    wide: tuple[float, float] | None = None  # 95 % interval over several models, seeds and batches
    conditional: bool = False  # what ``low`` and ``high`` decide, ``wide`` does not


def weigh(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what several findings say of a claim that needs them all.

    It is the one rule of the replication and the ledger: what fails outranks what holds; a claim
    holds only if every part does, so that an absent or undecided part leaves it undecided.
    """
    if Outcome.FAILS in outcomes:
        return Outcome.FAILS
    if not set(outcomes) - {Outcome.ABSENT, Outcome.IMPOSSIBLE}:
        return Outcome.ABSENT
    return Outcome.HOLDS if set(outcomes) == {Outcome.HOLDS} else Outcome.UNDECIDED


def deciding(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that decided a claim, the first of several; None if nothing was measured.

    A claim that only lacks a part was decided by none: its first measured finding is returned.
    """
    found = [finding for finding in findings if finding.effect is not None]
    outcome = weigh([finding.outcome for finding in findings])
    asked = (outcome, Outcome.MIXED) if outcome is Outcome.UNDECIDED else (outcome,)
    decided = [finding for finding in found if finding.outcome in asked]
    return next(iter(decided or found), None)


def only_here(outcome: Outcome, findings: Sequence[Finding]) -> bool:
    """Return True if a verdict speaks of these models and batches only, not of others like them.

    So it is where the interval over models and training seeds of a deciding finding is not known
    or does not decide the same: of all that fail, or of any of those that hold.
    """
    decided = [found.conditional for found in findings if found.outcome is outcome]
    if outcome is Outcome.FAILS:
        return bool(decided) and all(decided)
    return outcome is Outcome.HOLDS and any(decided)


def unanimous(fits: Sequence[bool]) -> Outcome:
    """Return the outcome of what is counted, not sampled: it is true of all, of some or of none."""
    return Outcome.HOLDS if all(fits) else Outcome.MIXED if any(fits) else Outcome.FAILS
