"""The ledger and the words of figures, as the site reads them.

They are written by `capmoe_eval.report.claims.render` and `capmoe_eval.report.figures.write`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, NonNegativeInt, ValidationError

from capmoe_eval.errors import UsageError, field_problem


class Published(BaseModel):
    """A value as the paper states it."""

    values: list[float | str]
    unit: str = ""


class Detail(BaseModel):
    """A number behind a finding; ``records`` are positions in the ledger's list of paths."""

    label: str
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
    """A claim or number of the paper, with its verdict and the label of the detail that decided."""

    version: str
    place: str
    quote: str
    kind: str
    published: Published | None
    note: str
    verdict: str
    scope: str
    decided_by: str | None
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
        UsageError: If it cannot be read or is not of this kind; the message names it.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    except ValidationError as error:
        raise UsageError(f"{path}: cannot be read ({field_problem(error)})") from error
