"""The claims of ``data/claims.yaml``, and their judgement by the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from capmoe_eval.paper.contrasts import Contrast, judge
from capmoe_eval.paper.evidence import Evidence, not_paired
from capmoe_eval.paper.replication.measures import MEASURES, Trainings
from capmoe_eval.paper.verdict_file import WrittenClaim, WrittenFinding
from capmoe_eval.paper.verdicts import WORD, Finding, summarize


class Claim(BaseModel):
    """One claim.

    Attributes:
        id: Its letter.
        place: Where the paper makes it.
        statement: The claim in our words.
        contrasts: The paired comparisons that test it.
        measure: Name of the function of ``measures`` that tests what no score can show, or None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    place: str
    statement: str
    contrasts: tuple[Contrast, ...] = ()
    measure: Literal["removed", "balance", "decay", "companions"] | None = None


@cache
def replication_claims() -> tuple[Claim, ...]:
    """Return the claims of the replication, in order."""
    text = (resources.files(__package__) / "data" / "claims.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Claim, ...]).validate_python(yaml.safe_load(text))


def find(claim: Claim, evidence: Evidence, trainings: Trainings = ()) -> list[Finding]:
    """Return the findings of a claim's contrasts, then those of its measure.

    p is corrected for the number of the claim's contrasts that ask for a direction.

    Raises:
        UsageError: If the records of a task do not pair: a verdict on a part of them is none.
    """
    for contrast in claim.contrasts:
        effect, _ = evidence.effect(contrast.first, contrast.second)
        for (model, task), reason in effect.unpaired.items():
            raise not_paired(model, task, reason)
    findings = judge(claim.contrasts, evidence, test_margins=False)
    return findings + (MEASURES[claim.measure](evidence, trainings) if claim.measure else [])


def judged(claim: Claim, findings: Sequence[Finding]) -> WrittenClaim:
    """Return a claim with its verdict, as it is written."""
    return WrittenClaim(
        id=claim.id,
        place=claim.place,
        statement=claim.statement,
        verdict=WORD[summarize([finding.outcome for finding in findings])],
        contrasts=tuple(map(WrittenFinding.of, findings)),
    )
