"""The file ``replication.json``: its schema."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from capmoe_eval.paper.verdicts import WORD, Finding

_Number = Annotated[float, AfterValidator(lambda value: round(value, 5))]
_Bound = Annotated[
    _Number | None, BeforeValidator(lambda end: None if end in (-math.inf, math.inf) else end)
]
"""One end of bounds; None where there is none."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True, allow_inf_nan=False)


class WrittenFinding(_Part):
    """A :class:`Finding`, its outcome as a word and its numbers rounded to five digits."""

    label: str
    verdict: str = ""
    unit: str = "points"
    effect: _Number | None
    low: _Number | None = None
    high: _Number | None = None
    p: _Number | None = None
    models: Mapping[str, _Number] = {}
    documents: int = 0
    note: str = ""
    bounds: tuple[_Bound, _Bound] | None = None
    wide: tuple[_Number, _Number] | None = None
    conditional: bool = False

    @classmethod
    def of(cls, finding: Finding) -> WrittenFinding:
        """Return a finding as it is written."""
        return cls(**dataclasses.asdict(finding) | {"verdict": WORD[finding.outcome]})


class WrittenClaim(_Part):
    """A claim with its verdict, the label of the finding that decided it, and all findings."""

    id: str
    place: str = ""
    statement: str = ""
    verdict: str
    scope: str = ""
    decided_by: str = ""
    refuted_by: str = ""
    note: str = ""
    contrasts: tuple[WrittenFinding, ...] = ()


class WrittenGrouping(_Part):
    """The gaps between the ways to keep tokens where a number of sequences share a capacity.

    ``distance`` is their mean distance from those of Table 1, which has none itself, in points.
    """

    label: str
    sequences: int | None = None
    gaps: tuple[WrittenFinding, ...]
    distance: float | None = None


class WrittenMargin(_Part):
    """A margin in points, with the printed cells behind it and the claims that it judges."""

    id: str
    points: _Number
    meaning: str
    words: str
    place: str
    source: str
    claims: tuple[str, ...] = ()


class VerdictFile(_Part):
    """The whole file: the verdicts on the records of one profile."""

    profile: str
    models: tuple[str, ...] = ()
    records: int = 0  # number of finished evaluations
    missing: int = 0  # number of evaluations that are not finished
    notes: tuple[str, ...] = ()  # on the models, and on files that could not be read
    level: float = 0.0  # family-wise error rate within a claim
    margins: tuple[WrittenMargin, ...] = ()
    claims: tuple[WrittenClaim, ...]
    grouping: tuple[WrittenGrouping, ...] = ()  # Table 1's gaps by the sequences per rank

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"
