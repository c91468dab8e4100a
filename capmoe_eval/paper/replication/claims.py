"""The claims of ``data/claims.yaml``, and their judgement by the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.paper.contrasts import Contrast, judge, read_contrasts
from capmoe_eval.paper.evidence import Evidence, not_paired
from capmoe_eval.paper.margins import margins
from capmoe_eval.paper.measures import measured
from capmoe_eval.paper.verdict_file import WrittenClaim, WrittenFinding, WrittenMargin
from capmoe_eval.paper.verdicts import ONLY_HERE, WORD, Finding, deciding, only_here, weigh


class Claim(BaseModel):
    """One claim."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # its letter
    place: str  # where the paper makes it
    statement: str  # the claim in our words
    refuted_by: str  # the result that would contradict it, in one sentence
    note: str = ""  # a remark on the comparison
    contrasts: Annotated[tuple[Contrast, ...], BeforeValidator(read_contrasts)] = ()
    measure: str = ""  # the function that tests what no score can show


def written_margins() -> tuple[WrittenMargin, ...]:
    """Return every margin as it is written."""
    written = []
    for name, margin in margins().items():
        claims = [c for c in replication_claims() if name in {x.expect.margin for x in c.contrasts}]
        judged_by_it = {"claims": tuple(claim.id for claim in claims)}
        written.append(WrittenMargin.model_validate(margin).model_copy(update=judged_by_it))
    return tuple(written)


@cache
def replication_claims() -> tuple[Claim, ...]:
    """Return the claims of the replication, in order."""
    return read_data(__package__, "data/claims.yaml", tuple[Claim, ...])


def find(claim: Claim, evidence: Evidence) -> list[Finding]:
    """Return the findings of a claim's contrasts, then those of its measure.

    Records of a task that do not pair are a UsageError: a verdict on a part of them is none.
    """
    for contrast in claim.contrasts:
        effect = evidence.effect(contrast.first, contrast.second, contrast.model)
        for (model, task), reason in effect.unpaired.items():
            raise not_paired(model, task, reason)
    findings = measured(claim.measure, evidence) if claim.measure else []
    return [*judge(claim.contrasts, evidence), *findings]


def judged(claim: Claim, findings: Sequence[Finding]) -> WrittenClaim:
    """Return a claim with its verdict, as it is written."""
    decided, outcome = deciding(findings), weigh([finding.outcome for finding in findings])
    return WrittenClaim(
        verdict=WORD[outcome],
        scope=ONLY_HERE if only_here(outcome, findings) else "",
        decided_by=decided.label if decided else "",
        contrasts=tuple(map(WrittenFinding.of, findings)),
        **claim.model_dump(exclude={"contrasts", "measure"}),
    )
