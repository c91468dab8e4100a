"""The file ``replication.json``: one schema for its writer and its readers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from capmoe_eval.errors import UsageError, field_problem
from capmoe_eval.paper.verdicts import WORD, Finding, Outcome

_OUTCOME = {word: outcome for outcome, word in WORD.items()}


def outcome_of(word: str) -> Outcome:
    """Return the outcome that a verdict stands for; a word that is not ours decides nothing."""
    return _OUTCOME.get(word, Outcome.UNDECIDED)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class WrittenFinding(_Part):
    """A :class:`Finding`, its outcome as a word and its numbers rounded to five digits."""

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

    @classmethod
    def of(cls, finding: Finding) -> WrittenFinding:
        """Return a finding as it is written."""
        content = dataclasses.asdict(finding) | {"verdict": WORD[finding.outcome]}
        for name in ("effect", "low", "high", "p"):
            content[name] = None if content[name] is None else round(content[name], 5)
        content["models"] = {model: round(value, 5) for model, value in finding.models.items()}
        return cls.model_validate(content)


class WrittenClaim(_Part):
    """A claim with its verdict and findings."""

    id: str
    place: str = ""
    statement: str = ""
    verdict: str
    scope: str = ""
    contrasts: tuple[WrittenFinding, ...] = ()


class VerdictFile(_Part):
    """The whole file.

    Attributes:
        profile: The profile whose records were judged.
        models: Its models.
        records: Number of finished evaluations.
        missing: Number of evaluations that are not finished.
        notes: Remarks on the models and on files that could not be read.
        level: Family-wise error rate within a claim.
        margin: Points that count as close.
        claims: The claims.
    """

    profile: str
    models: tuple[str, ...] = ()
    records: int = 0
    missing: int = 0
    notes: tuple[str, ...] = ()
    level: float = 0.0
    margin: float = 0.0
    claims: tuple[WrittenClaim, ...]

    def claim(self, name: str) -> WrittenClaim | None:
        """Return the claim with an id, or None."""
        return next((claim for claim in self.claims if claim.id == name), None)

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"


def read_verdicts(path: Path, profile: str) -> VerdictFile | None:
    """Read the verdicts on a profile, or return None if there is no file.

    Raises:
        UsageError: If the file is damaged, or of another profile; the message names it.
    """
    if not path.is_file():
        return None
    try:
        found = VerdictFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path}: no replication report ({field_problem(error)})") from error
    except OSError as error:
        raise UsageError(f"{path}: no replication report ({error})") from error
    if found.profile != profile:
        raise UsageError(
            f"{path}: verdicts of profile {found.profile}, not of {profile}; run "
            f"`python -m capmoe_eval.replication profile={profile}`"
        )
    return found
