"""The claims of ``data/claims.yaml``, and their judgement by the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter

from capmoe_eval.paper.contrasts import Contrast, judge, read_contrasts
from capmoe_eval.paper.evidence import Evidence, not_paired
from capmoe_eval.paper.margins import margins
from capmoe_eval.paper.measures import MEASURES, Measure
from capmoe_eval.paper.verdict_file import WrittenClaim, WrittenFinding, WrittenMargin
from capmoe_eval.paper.verdicts import ONLY_HERE, WORD, Finding, deciding, only_here, weigh


class Claim(BaseModel):
    """One claim.

    Attributes:
        id: Its letter.
        place: Where the paper makes it.
        statement: The claim in our words.
        refuted_by: The result that would contradict it, in one sentence.
        note: A remark on the comparison; may be empty.
        contrasts: The paired comparisons that test it.
        measure: Name of the function of ``measures`` that tests what no score can show, or None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    place: str
    statement: str
    refuted_by: str
    note: str = ""
    contrasts: Annotated[tuple[Contrast, ...], BeforeValidator(read_contrasts)] = ()
    measure: Measure | None = None


def written_margins() -> tuple[WrittenMargin, ...]:
    """Return every margin as it is written."""
    judging = [
        (claim.id, {contrast.expect.margin for contrast in claim.contrasts})
        for claim in replication_claims()
    ]
    return tuple(
        WrittenMargin(
            points=round(margin.points, 5),
            source=margin.source,
            claims=tuple(claim for claim, names in judging if margin.id in names),
            **margin.model_dump(include={"id", "meaning", "words", "place"}),
        )
        for margin in margins().values()
    )


@cache
def replication_claims() -> tuple[Claim, ...]:
    """Return the claims of the replication, in order."""
    text = (resources.files(__package__) / "data" / "claims.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Claim, ...]).validate_python(yaml.safe_load(text))


def find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return the findings of a claim's contrasts, then those of its measure.

    Raises:
        UsageError: If the records of a task do not pair: a verdict on a part of them is none.
    """
    for contrast in claim.contrasts:
        effect, _ = evidence.effect(contrast.first, contrast.second, contrast.model)
        for (model, task), reason in effect.unpaired.items():
            raise not_paired(model, task, reason)
    measured = MEASURES[claim.measure](evidence) if claim.measure else []
    return [*judge(claim.contrasts, evidence), *measured]


def judged(claim: Claim, findings: Sequence[Finding]) -> WrittenClaim:
    """Return a claim with its verdict, as it is written."""
    decided, outcome = deciding(findings), weigh([finding.outcome for finding in findings])
    return WrittenClaim(
        id=claim.id,
        place=claim.place,
        statement=claim.statement,
        verdict=WORD[outcome],
        scope=ONLY_HERE if only_here(outcome, findings) else "",
        decided_by=decided.label if decided else "",
        refuted_by=claim.refuted_by,
        note=claim.note,
        contrasts=tuple(map(WrittenFinding.of, findings)),
    )
