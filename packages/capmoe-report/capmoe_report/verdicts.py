"""The words of verdicts, what follows for a claim from several findings, and files of verdicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

from capmoe_eval.experiment.names import family
from pydantic import BaseModel, PlainSerializer, SerializationInfo

from capmoe_report.records import seen_from

LEVEL: Final = 0.05
"""Family-wise error rate within a claim."""

BEYOND: Final = 1.96
"""Standard errors at which a normal difference is significant at that level."""


class Outcome(str, Enum):
    """The result of a test of a claim, in the words of the verdicts."""

    __str__ = str.__str__

    HOLDS = "confirmed"
    FAILS = "contradicted"
    UNDECIDED = "not shown"
    MIXED = "mixed"
    """It holds on some models and fails on others; of a claim, this decides nothing."""
    ABSENT = "not measured"
    """It could be measured here; the records are missing."""
    IMPOSSIBLE = "not testable here"
    """It needs hardware, weights or data that this suite lacks."""
    NONE = ""
    """It is a printed number, and no test."""


INCONSISTENT: Final = "inconsistent in print"
ONLY_HERE: Final = "on these models"
"""The scope of a verdict that holds for these models and batches, and is not shown for others."""

_GAPS_FIRST: Final = (Outcome.FAILS.value, Outcome.UNDECIDED.value, Outcome.HOLDS.value)
"""The verdicts on what was measured, in the order in which a reader must know them."""


def _from_file(paths: Iterable[str], info: SerializationInfo) -> list[str]:
    """Return paths as seen from the directory of their file, the context of the dump."""
    return [seen_from(info.context or Path(), path) for path in paths]


# Written numbers have five digits.
_Number = Annotated[float, PlainSerializer(lambda value: round(value, 5))]
_Bound = Annotated[
    float | None,  # None where there is none
    PlainSerializer(lambda end: None if end is None or math.isinf(end) else round(end, 5)),
]


class Finding(BaseModel, frozen=True):
    """A test of a claim, or the check that several tests make up.

    A check has no label. Its verdict follows from its tests, and its text says how.
    """

    label: str = ""  # what was compared or measured
    verdict: Outcome
    unit: str = ""  # "points" for accuracies in percent; empty for shares and ratios
    effect: _Number | None = None  # in the unit; None where it was not measured
    low: _Number | None = None  # of its 95 % confidence interval over documents, if it has one
    high: _Number | None = None
    # Of the bound, two-sided, corrected for the claim's contrasts (Holm).
    p: Annotated[float, PlainSerializer(lambda value: round(value, 10))] | None = None
    models: Mapping[str, _Number] = {}  # the effect on each model alone
    documents: int = 0  # number of documents that were compared
    note: str = ""  # a remark for the reader
    bounds: tuple[_Bound, _Bound] | None = None  # where the effect must lie; ``inf``: no bound
    wide: tuple[_Number, _Number] | None = None  # 95 % interval over families and documents
    conditional: bool = False  # decided over documents, not over families
    compared: str = ""  # which tasks of how many models
    detectable: _Number | None = None  # points within a margin that 80 % of studies would decide
    text: str = ""  # of a check: sentences with its numbers
    scope: str = ""  # of a check: of what it speaks, if not of the profile's records
    # Paths of the records, or of the files of timings or trainings, that it was computed from.
    records: Annotated[tuple[str, ...], PlainSerializer(_from_file)] = ()

    @property
    def seeds(self) -> tuple[float, ...]:
        """The points of each training seed, where one family has several and no other is in it."""
        is_of_one = self.unit == "points" and len(set(map(family, self.models))) == 1
        return tuple(self.models.values()) if is_of_one and len(self.models) > 1 else ()


def listed(text: str, items: Sequence[str], most: int = 12) -> str:
    """Return a sentence followed by items, the first ``most`` of them."""
    if not items:
        return text
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return f"{text} {'; '.join(items[:most])}{rest}."


def weigh(findings: Iterable[Finding]) -> Outcome:
    """Return what several findings say of a claim that needs them all.

    It is the one rule of the replication and the ledger: what fails outranks what holds; a claim
    holds only if every part does, so that an absent or undecided part leaves it undecided.
    """
    verdicts = {finding.verdict for finding in findings}
    if Outcome.FAILS in verdicts:
        return Outcome.FAILS
    if not verdicts - {Outcome.ABSENT, Outcome.IMPOSSIBLE}:
        return Outcome.ABSENT
    return Outcome.HOLDS if verdicts == {Outcome.HOLDS} else Outcome.UNDECIDED


def deciding(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that decided a claim, the first of several; None if nothing was measured.

    A claim that only lacks a part was decided by none: its first measured finding is returned.
    """
    measured = [finding for finding in findings if finding.effect is not None]
    verdict = weigh(findings)
    deciders = (verdict, Outcome.MIXED) if verdict is Outcome.UNDECIDED else (verdict,)
    decided = [finding for finding in measured if finding.verdict in deciders]
    return next(iter(decided or measured), None)


def only_here(verdict: Outcome, findings: Iterable[Finding]) -> bool:
    """Return True if a verdict speaks of these models and batches only, not of others like them.

    So it is where a deciding finding is not decided over families, too: all that fail, or any of
    those that hold.
    """
    decided = [f.conditional for f in findings if f.verdict is verdict]
    if verdict is Outcome.FAILS:
        return bool(decided) and all(decided)
    return verdict is Outcome.HOLDS and any(decided)


def unanimous(fits: Collection[bool]) -> Outcome:
    """Return the outcome of what is counted, not sampled: it is true of all, of some or of none."""
    return Outcome.HOLDS if all(fits) else Outcome.MIXED if any(fits) else Outcome.FAILS


class JudgedClaim(BaseModel, frozen=True):
    """A claim with its verdict, and every finding behind it."""

    id: str
    beyond: bool = False  # it goes beyond the paper's text
    section: str = ""
    place: str = ""
    version: str = ""
    quote: str = ""  # the paper's own words
    published: str = ""  # the published values with their unit
    statement: str = ""
    verdict: str
    scope: str = ""
    decided_by: str = ""  # the label of the finding that decided, or would but for print
    refuted_by: str = ""
    note: str = ""
    contrasts: tuple[Finding, ...] = ()  # the findings of all checks
    # The kind of each check with its own finding, then those that it rests on.
    checks: tuple[tuple[str, tuple[Finding, ...]], ...] = ()


class Grouping(BaseModel, frozen=True):
    """The gaps between the ways to keep tokens where a number of sequences share a capacity.

    ``distance`` is their mean distance from those of Table 1, which has none itself, in points.
    """

    label: str
    sequences: int | None = None
    gaps: tuple[Finding, ...]
    distance: _Number | None = None


class VerdictFile(BaseModel, frozen=True):
    """The verdicts on the records of one profile: ``replication.json``, or the ledger."""

    profile: str
    models: tuple[str, ...] = ()
    records: int = 0  # number of finished evaluations
    missing: int = 0  # number of evaluations that are not finished
    notes: tuple[str, ...] = ()  # on the models, their limits, and what is left out
    level: float = 0.0  # family-wise error rate within a claim
    # Each with its points, the printed cells behind it and the claims that it judges.
    margins: tuple[Mapping[str, Any], ...] = ()
    claims: tuple[JudgedClaim, ...]
    grouping: tuple[Grouping, ...] = ()  # Table 1's gaps by the sequences per rank

    def select(self, *, beyond: bool) -> list[JudgedClaim]:
        """Return the claims of the paper's text, or those beyond it, what fails first."""
        claims = [claim for claim in self.claims if claim.beyond is beyond]
        return sorted(claims, key=lambda claim: (*_GAPS_FIRST, claim.verdict).index(claim.verdict))

    @property
    def summary(self) -> str:
        """The main claims of the paper's text, and those beyond it, counted by verdict."""
        groups = []
        for beyond, name in enumerate(
            ("main claims of the paper's text", "claims beyond the text")
        ):
            counts = Counter(claim.verdict for claim in self.select(beyond=bool(beyond)))
            words = dict.fromkeys((*_GAPS_FIRST, *counts))
            verdicts = ", ".join(f"{counts[word]} {word}" for word in words)
            groups.append(f"{counts.total()} {name}: {verdicts}")
        return "; ".join(groups)

    def to_json(self) -> str:
        """Return the text of ``replication.json``: contrasts, their records in another file."""
        of_ledger = ("checks", "section", "version", "quote", "published")
        findings = {"__all__": {"text", "scope", "records"}}
        claims = {"__all__": dict.fromkeys(of_ledger, True) | {"contrasts": findings}}
        groupings = {"__all__": {"gaps": findings}}
        content = self.model_dump(mode="json", exclude={"claims": claims, "grouping": groupings})
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def to_ledger(self, folder: Path) -> str:
        """Return the text of ``claims.json`` in a directory: claims with their checks."""
        findings = {"claims": {"__all__": {"contrasts"}}}  # those of the checks, again
        content = self.model_dump(
            mode="json", exclude=findings, exclude_defaults=True, context=folder
        )
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
