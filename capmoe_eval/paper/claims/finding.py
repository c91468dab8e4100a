"""What a check finds, and what follows from several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from capmoe_eval.paper.claims.entries import Entry
from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    INCONSISTENT,
    NOT_MEASURED,
    NOT_SHOWN,
    NOT_TESTABLE,
    WORD,
    Outcome,
)


@dataclass(frozen=True)
class Detail:
    """One number behind a finding.

    Attributes:
        label: What it is.
        effect: The value, in ``unit``.
        low: Lower end of its 95 % confidence interval; None where there is none.
        high: Upper end.
        p: Two-sided p, corrected for the contrasts of the claim (Holm); None where nothing was
            tested.
        unit: "points" for accuracies in percent; empty for shares and ratios.
        models: The same for each model alone.
        records: Paths of the records that it was computed from.
    """

    label: str
    effect: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    unit: str = ""
    models: Mapping[str, float] = field(default_factory=dict)
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        source: Kind of the check (:data:`capmoe_eval.paper.claims.entries.CHECKS`).
        outcome: What it says of the claim.
        text: One or more sentences with the numbers.
        details: The numbers behind it.
        scope: What it speaks of, where that is not what the profile's records speak of.
    """

    source: str
    outcome: Outcome
    text: str
    details: tuple[Detail, ...] = ()
    scope: str = ""


SCOPES: Final[Mapping[str, str]] = {
    "paper": "on the paper's checkpoints",
    "zoo": "at toy scale",
    "tiny": "on untrained models",
}
"""What a measured verdict speaks of, by profile."""
_IN_PRINT: Final = "in print"
EMULATED: Final = "in direction, emulated"
"""Scope of a verdict on timings that are not all of real ranks."""

# The first source that decides is the verdict's. A replication report has contrasts made for one
# claim each; it goes before the simple ones here.
_MEASURED: Final = ({"value"}, {"replication"}, {"measured", "load", "promise"}, {"speedup"})
_DECIDED: Final = {Outcome.HOLDS, Outcome.FAILS, Outcome.UNDECIDED}


@dataclass(frozen=True)
class Verdict:
    """What this suite says of a claim.

    Attributes:
        entry: The claim.
        word: One of :data:`capmoe_eval.paper.verdicts.WORDS`.
        scope: What the word speaks of: "in print" (arithmetic of the printed numbers),
            "at toy scale", …; empty where nothing was found.
        findings: Everything that was found, in the order of the entry's checks.
    """

    entry: Entry
    word: str
    scope: str
    findings: tuple[Finding, ...]

    @property
    def label(self) -> str:
        """The word with its scope, as shown."""
        return self.word if not self.scope else f"{self.word} {self.scope}".strip()


def conclude(entry: Entry, findings: Sequence[Finding], profile: str) -> Verdict:
    """Return the verdict that follows from an entry's findings.

    What the paper's own numbers refute is inconsistent in print, whatever was measured. Else
    measurements decide: one that fails contradicts, all that hold confirm, anything between, or
    half measured, is not shown. Timings speak of a direction at most. Without a measurement,
    arithmetic that holds confirms in print.
    """

    def verdict(word: str, scope: str = "") -> Verdict:
        return Verdict(entry, word, scope, tuple(findings))

    printed = [f.outcome for f in findings if f.source in ("printed", "agree")]
    if Outcome.FAILS in printed:
        return verdict(INCONSISTENT)
    for sources in _MEASURED:
        outcomes = [f.outcome for f in findings if f.source in sources]
        if any(outcome in _DECIDED for outcome in outcomes):
            scopes = [f.scope for f in findings if f.source in sources and f.scope]
            if scopes:
                return _of_direction(entry, findings, combine(outcomes), scopes[0])
            word = WORD[combine(outcomes)]
            return verdict(word, SCOPES.get(profile, f"in profile {profile}"))
    if Outcome.UNDECIDED in printed:
        return verdict(NOT_SHOWN, _IN_PRINT)
    if Outcome.HOLDS in printed:
        return verdict(CONFIRMED, _IN_PRINT)
    if any(f.outcome is Outcome.ABSENT for f in findings):
        return verdict(NOT_MEASURED)
    return verdict(NOT_TESTABLE)


def _of_direction(
    entry: Entry, findings: Sequence[Finding], outcome: Outcome, scope: str
) -> Verdict:
    """Return the verdict of timings on other machines, or of emulations: of a direction alone.

    A number that the paper prints is neither confirmed nor contradicted by them, and an emulation,
    which leaves out more than it has, contradicts nothing.
    """
    if outcome is Outcome.FAILS and scope == EMULATED:
        return Verdict(entry, NOT_SHOWN, "(the opposite, but emulated)", tuple(findings))
    if entry.kind != "number":
        return Verdict(entry, WORD[outcome], scope, tuple(findings))
    order = {Outcome.HOLDS: "as stated", Outcome.FAILS: "the opposite"}
    said = f"(the order is {order.get(outcome, 'open')} {scope})"
    return Verdict(entry, NOT_SHOWN, said, tuple(findings))


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what several parts of a claim say together: all must hold, and one can refute."""
    if Outcome.FAILS in outcomes:
        return Outcome.FAILS
    if outcomes and all(outcome is Outcome.HOLDS for outcome in outcomes):
        return Outcome.HOLDS
    return Outcome.UNDECIDED


def in_print(holds: bool | None, text: str) -> Finding:
    """Return a finding of arithmetic in print; None gives numbers and decides nothing."""
    outcome = Outcome.IMPOSSIBLE if holds is None else Outcome.HOLDS if holds else Outcome.FAILS
    return Finding("printed", outcome, text)


def listed(text: str, items: Sequence[str], most: int = 12) -> str:
    """Return a sentence followed by items, the first ``most`` of them."""
    if not items:
        return text
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return f"{text} {'; '.join(items[:most])}{rest}."
