"""The file ``replication.json``: its schema."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from capmoe_eval.paper.verdicts import WORD, Finding


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class WrittenFinding(_Part):
    """A :class:`Finding`, its outcome as a word and its numbers rounded to five digits.

    ``bounds`` has None where there is no bound.
    """

    label: str
    verdict: str = ""
    unit: str = "points"
    effect: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    models: Mapping[str, float] = {}
    documents: int = 0
    note: str = ""
    bounds: tuple[float | None, float | None] | None = None
    wide: tuple[float, float] | None = None
    conditional: bool = False

    @classmethod
    def of(cls, finding: Finding) -> WrittenFinding:
        """Return a finding as it is written."""
        content = dataclasses.asdict(finding) | {"verdict": WORD[finding.outcome]}
        for name in ("effect", "low", "high", "p"):
            content[name] = None if content[name] is None else round(content[name], 5)
        for name in ("bounds", "wide"):
            content[name] = content[name] and [
                round(end, 5) if math.isfinite(end) else None for end in content[name]
            ]
        content["models"] = {model: round(value, 5) for model, value in finding.models.items()}
        return cls.model_validate(content)


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


class WrittenMargin(_Part):
    """A margin in points, with the printed cells behind it and the claims that it judges."""

    id: str
    points: float
    meaning: str
    words: str
    place: str
    source: str
    claims: tuple[str, ...] = ()


class VerdictFile(_Part):
    """The whole file.

    Attributes:
        profile: The profile whose records were judged.
        models: Its models.
        records: Number of finished evaluations.
        missing: Number of evaluations that are not finished.
        notes: Remarks on the models and on files that could not be read.
        level: Family-wise error rate within a claim.
        margins: The margins of the claims.
        claims: The claims.
    """

    profile: str
    models: tuple[str, ...] = ()
    records: int = 0
    missing: int = 0
    notes: tuple[str, ...] = ()
    level: float = 0.0
    margins: tuple[WrittenMargin, ...] = ()
    claims: tuple[WrittenClaim, ...]

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"
