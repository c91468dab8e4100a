"""The types of the JSON files that reports leave for the site: verdicts, ledger, figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, NonNegativeInt, ValidationError

from capmoe_eval.errors import field_problem


class Contrast(BaseModel):
    """One point of a claim in the replication's verdicts; numbers that are not known are None."""

    label: str
    verdict: str
    unit: str = "points"
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    models: dict[str, float] = {}
    note: str = ""


class Judgement(BaseModel):
    """A claim with the verdict of the replication."""

    id: str
    place: str
    statement: str
    verdict: str
    contrasts: list[Contrast]


class Replication(BaseModel):
    """The verdicts of the replication on a profile: numbers of its records, missing ones, notes."""

    profile: str
    models: list[str]
    records: int
    missing: int
    notes: list[str]
    claims: list[Judgement]


class Published(BaseModel):
    """A value as the paper states it."""

    values: list[float | str]
    unit: str = ""


class Detail(BaseModel):
    """A number behind a finding; ``records`` are positions in the ledger's list of paths."""

    effect: float
    low: float | None
    high: float | None
    unit: str
    records: list[NonNegativeInt]


class Finding(BaseModel):
    """The result of one check of a claim."""

    source: str
    outcome: str
    text: str
    details: list[Detail]


class LedgerClaim(BaseModel):
    """A claim or number of the paper, with its verdict."""

    version: str
    place: str
    quote: str
    kind: str
    published: Published | None
    note: str
    verdict: str
    scope: str
    findings: list[Finding]


class Ledger(BaseModel):
    """Every claim of the paper, and the paths of the records that verdicts rest on."""

    profile: str
    records: list[str]
    claims: list[LedgerClaim]


class MissingRecords(BaseModel):
    """The records that a figure lacks, of so many, and the commands that compute them."""

    records: int
    of: int
    commands: list[str]


class FigureText(BaseModel):
    """The words beside a figure."""

    title: str
    place: str
    caption: str
    notes: list[str]
    missing: MissingRecords


File = TypeVar("File", bound=BaseModel)


def read(kind: type[File], path: Path) -> File:
    """Read a file.

    Raises:
        ValueError: If it cannot be read or is not of this kind; the message names it.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except ValidationError as error:
        raise ValueError(f"{path}: cannot be read ({field_problem(error)})") from error


def verdict_counts(file: Replication | Ledger) -> Counter[str]:
    """Return how many claims have each verdict, in the order of their first."""
    return Counter(claim.verdict for claim in file.claims)
