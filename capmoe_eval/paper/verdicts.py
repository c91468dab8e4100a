"""The words of verdicts, what follows for a claim from several findings, and replication.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

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
"""Every verdict of the ledger; docs/explanation/verdicts.md says how each is reached."""

_GAPS_FIRST: Final = (CONTRADICTED, NOT_SHOWN, CONFIRMED)
"""The verdicts on what was measured, in the order in which a reader must know them."""


@dataclass(frozen=True)
class Finding:
    """One number on a claim, and its outcome."""

    label: str  # what was compared or measured
    outcome: Outcome  # what it says of the claim
    effect: float | None = None  # the value, in ``unit``; None where it was not measured
    low: float | None = None  # of its 95 % confidence interval over documents, if it has one
    high: float | None = None
    p: float | None = None  # of the bound, two-sided, corrected for the claim's contrasts (Holm)
    unit: str = ""  # "points" for accuracies in percent; empty for shares and ratios
    models: Mapping[str, float] = field(default_factory=dict)  # the effect on each model alone
    documents: int = 0  # number of documents that were compared
    # Paths of the records, or of the files of timings or trainings, that it was computed from.
    records: tuple[str, ...] = ()
    note: str = ""  # a remark for the reader
    bounds: tuple[float, float] | None = None  # where the effect must lie; ``inf``: no bound
    wide: tuple[float, float] | None = None  # 95 % interval over families and documents
    conditional: bool = False  # decided over documents, not over families
    compared: str = ""  # which tasks of how many models
    detectable: float | None = None  # points within a margin that 80 % of studies would decide


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    source: str  # the kind of the check
    outcome: Outcome  # what it says of the claim
    text: str  # one or more sentences with the numbers
    findings: tuple[Finding, ...] = ()  # the numbers behind it
    scope: str = ""  # of what it speaks, if not of the profile's records


def in_print(holds: bool | None, text: str) -> CheckResult:
    """Return a result of arithmetic in print; None gives numbers and decides nothing."""
    outcome = Outcome.IMPOSSIBLE if holds is None else Outcome.HOLDS if holds else Outcome.FAILS
    return CheckResult("printed", outcome, text)


def listed(text: str, items: Sequence[str], most: int = 12) -> str:
    """Return a sentence followed by items, the first ``most`` of them."""
    if not items:
        return text
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return f"{text} {'; '.join(items[:most])}{rest}."


def tallied(text: str, failed: Sequence[str], total: int) -> CheckResult:
    """Return a result that holds if no case failed; the text has places ``{fit}`` and ``{all}``."""
    return in_print(not failed, listed(text.format(fit=total - len(failed), all=total), failed))


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
    measured = [finding for finding in findings if finding.effect is not None]
    outcome = weigh([finding.outcome for finding in findings])
    deciders = (outcome, Outcome.MIXED) if outcome is Outcome.UNDECIDED else (outcome,)
    decided = [finding for finding in measured if finding.outcome in deciders]
    return next(iter(decided or measured), None)


def only_here(outcome: Outcome, findings: Sequence[Finding]) -> bool:
    """Return True if a verdict speaks of these models and batches only, not of others like them.

    So it is where a deciding finding is not decided over families, too: all that fail, or any of
    those that hold.
    """
    decided = [f.conditional for f in findings if f.outcome is outcome]
    if outcome is Outcome.FAILS:
        return bool(decided) and all(decided)
    return outcome is Outcome.HOLDS and any(decided)


def unanimous(fits: Sequence[bool]) -> Outcome:
    """Return the outcome of what is counted, not sampled: it is true of all, of some or of none."""
    return Outcome.HOLDS if all(fits) else Outcome.MIXED if any(fits) else Outcome.FAILS


_Number = Annotated[float, AfterValidator(lambda value: round(value, 5))]
_Bound = Annotated[
    _Number | None, BeforeValidator(lambda end: None if end in (-math.inf, math.inf) else end)
]
"""One end of bounds; None where there is none."""


class _Written(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True, allow_inf_nan=False)


class WrittenFinding(_Written):
    """A :class:`Finding`, its outcome as a word and its numbers rounded to five digits."""

    label: str
    verdict: str = ""
    unit: str = "points"
    effect: _Number | None
    low: _Number | None = None
    high: _Number | None = None
    p: Annotated[float, AfterValidator(lambda value: round(value, 10))] | None = None
    models: Mapping[str, _Number] = {}
    documents: int = 0
    note: str = ""
    bounds: tuple[_Bound, _Bound] | None = None
    wide: tuple[_Number, _Number] | None = None
    conditional: bool = False
    compared: str = ""
    detectable: _Number | None = None
    records: tuple[str, ...] = Field(default=(), exclude=True)  # replication.records.json has them

    @classmethod
    def of(cls, finding: Finding) -> WrittenFinding:
        """Return a finding as it is written."""
        return cls(**dataclasses.asdict(finding) | {"verdict": WORD[finding.outcome]})


class WrittenClaim(_Written):
    """A claim with its verdict, the label of the finding that decided it, and all findings."""

    id: str
    beyond: bool = False  # it goes beyond the paper's text
    place: str = ""
    statement: str = ""
    verdict: str
    scope: str = ""
    decided_by: str = ""
    refuted_by: str = ""
    note: str = ""
    contrasts: tuple[WrittenFinding, ...] = ()


class WrittenGrouping(_Written):
    """The gaps between the ways to keep tokens where a number of sequences share a capacity.

    ``distance`` is their mean distance from those of Table 1, which has none itself, in points.
    """

    label: str
    sequences: int | None = None
    gaps: tuple[WrittenFinding, ...]
    distance: float | None = None


class WrittenMargin(_Written):
    """A margin in points, with the printed cells behind it and the claims that it judges."""

    id: str
    points: _Number
    meaning: str
    words: str
    place: str
    source: str
    claims: tuple[str, ...] = ()


class VerdictFile(_Written):
    """The file ``replication.json``: the verdicts on the records of one profile."""

    profile: str
    models: tuple[str, ...] = ()
    records: int = 0  # number of finished evaluations
    missing: int = 0  # number of evaluations that are not finished
    notes: tuple[str, ...] = ()  # on the models, and on files that could not be read
    level: float = 0.0  # family-wise error rate within a claim
    margins: tuple[WrittenMargin, ...] = ()
    claims: tuple[WrittenClaim, ...]
    grouping: tuple[WrittenGrouping, ...] = ()  # Table 1's gaps by the sequences per rank

    def select(self, *, beyond: bool) -> list[WrittenClaim]:
        """Return the claims of the paper's text, or those beyond it, what fails first."""
        claims = [claim for claim in self.claims if claim.beyond is beyond]
        return sorted(claims, key=lambda claim: (*_GAPS_FIRST, claim.verdict).index(claim.verdict))

    @property
    def summary(self) -> str:
        """The claims of the paper's text, and those beyond it, counted by verdict."""
        groups = []
        for beyond, name in enumerate(("claims of the paper's text", "claims beyond the text")):
            counts = Counter(claim.verdict for claim in self.select(beyond=bool(beyond)))
            words = dict.fromkeys((*_GAPS_FIRST, *counts))
            verdicts = ", ".join(f"{counts[word]} {word}" for word in words)
            groups.append(f"{counts.total()} {name}: {verdicts}")
        return "; ".join(groups)

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"
