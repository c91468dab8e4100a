"""The claims that are tested on every model of a profile (``experiment=replicate``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.names import metric_title
from capmoe_eval.paper.contrasts import Contrast, judge, margins, read_contrasts
from capmoe_eval.paper.evidence import Evidence, not_paired
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.measures import measured
from capmoe_eval.paper.printed import PrintedRow, find_row
from capmoe_eval.paper.verdicts import (
    ONLY_HERE,
    WORD,
    Finding,
    WrittenClaim,
    WrittenFinding,
    WrittenGrouping,
    WrittenMargin,
    deciding,
    only_here,
    weigh,
)

GAPS: Final = (("score", "random"), ("random", "reverse_order"), ("reverse_order", "order"))
"""The ways to keep tokens that are neighbours in Table 1, the better first."""
_GAMMA: Final = 1.0
_SEQUENCES: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "two on each rank": (2, {"batch_size": 16}),
    **{f"{size} on one rank": (size, {"ep_size": 1, "batch_size": size}) for size in (4, 16, 64)},
}  # the sequences that share a capacity, and the settings of their evaluations


class ReplicationClaim(BaseModel):
    """One claim of ``data/replication.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # its letter
    place: str  # where the paper makes it
    statement: str  # the claim in our words
    refuted_by: str  # the result that would contradict it, in one sentence
    beyond: str = ""  # how it goes beyond the paper's text, in one sentence
    note: str = ""  # a remark on the comparison
    contrasts: Annotated[tuple[Contrast, ...], BeforeValidator(read_contrasts)] = ()
    measure: str = ""  # the function that tests what no score can show


@cache
def replication_claims() -> tuple[ReplicationClaim, ...]:
    """Return the claims of the replication, in order."""
    return read_data(__package__, "data/replication.yaml", tuple[ReplicationClaim, ...])


def written_margins() -> tuple[WrittenMargin, ...]:
    """Return every margin as it is written, with the claims that it judges."""
    written = []
    for name, margin in margins().items():
        claims = [c for c in replication_claims() if name in {x.expect.margin for x in c.contrasts}]
        letters = {"claims": tuple(claim.id for claim in claims)}
        written.append(WrittenMargin.model_validate(margin).model_copy(update=letters))
    return tuple(written)


def find(claim: ReplicationClaim, evidence: Evidence) -> list[Finding]:
    """Return the findings of a claim's contrasts, then those of its measure.

    Records of a task that do not pair are a UsageError: a verdict on a part of them is none.
    """
    for contrast in claim.contrasts:
        effect = evidence.effect(contrast.first, contrast.second, contrast.model)
        for (model, task), reason in effect.unpaired.items():
            raise not_paired(model, task, reason)
    findings = measured(claim.measure, evidence) if claim.measure else []
    return [*judge(claim.contrasts, evidence), *findings]


def judged(claim: ReplicationClaim, evidence: Evidence) -> WrittenClaim:
    """Return a claim with its verdict, as it is written; errors as :func:`find`."""
    findings = find(claim, evidence)
    decided, outcome = deciding(findings), weigh([finding.outcome for finding in findings])
    scopes = [ONLY_HERE] if only_here(outcome, findings) else []
    if claim.beyond and decided:
        scopes.append(beyond_text(evidence, findings, claim.contrasts))
    return WrittenClaim(
        verdict=WORD[outcome],
        scope=" ".join(scopes),
        beyond=bool(claim.beyond),
        decided_by=decided.label if decided else "",
        contrasts=tuple(map(WrittenFinding.of, findings)),
        note=" ".join(filter(None, (claim.beyond, claim.note))),
        **claim.model_dump(exclude={"contrasts", "measure", "beyond", "note"}),
    )


def beyond_text(
    evidence: Evidence, findings: Sequence[Finding], contrasts: Sequence[Contrast] = ()
) -> str:
    """Return the scope of a verdict on what the paper's text does not say, with its batches.

    They are those of the models' deployments; a contrast that names others says so itself. Where
    all contrasts do, no batches are named.
    """
    sides = [side for contrast in contrasts for side in (contrast.first, contrast.second)]
    if sides and all(side.batch_size and "ep_size" in side.knobs for side in sides):
        return "(beyond the text)"
    models = {model for finding in findings for model in finding.models}
    deployments = [evidence.deployments[name] for name in models & evidence.deployments.keys()]
    sizes, ranks = ({getattr(d, name) for d in deployments} for name in ("batch_size", "ep_size"))
    numbers = [" or ".join(map(str, sorted(values, key=str))) for values in (sizes, ranks)]
    return f"(beyond the text, in batches of {numbers[0]} on {numbers[1]} ranks)"


def grouping(evidence: Evidence) -> tuple[WrittenGrouping, ...]:
    """Return the gaps between the ways to keep tokens for each number of sequences per rank.

    The first row is what Table 1 prints for OLMoE on the tasks that all others have; these are
    measured, if recorded. ``distance`` is the mean distance of a row's gaps from the printed ones,
    in points.
    """
    contrasts = {
        label: [_contrast(*gap, settings) for gap in GAPS]
        for label, (_, settings) in _SEQUENCES.items()
    }
    compared = [evidence.effect(c.first, c.second) for row in contrasts.values() for c in row]
    of_models = [set(tasks) for effect in compared for tasks in effect.tasks.values()]
    columns = {column.printed or column.heading: column.task for column in ALL_TASKS}
    shared = [
        heading
        for heading in _table1("score").tasks
        if all(columns[heading] in tasks for tasks in of_models)
    ]
    if not shared:
        return ()
    means = {side: fmean(_table1(side).values[h] for h in shared) for gap in GAPS for side in gap}
    printed = [means[first] - means[second] for first, second in GAPS]
    in_print = tuple(WrittenFinding(label="as printed", effect=round(g, 2)) for g in printed)
    rows = [WrittenGrouping(label=f"Table 1, OLMoE: {', '.join(shared)}", gaps=in_print)]
    for label, (sequences, _) in _SEQUENCES.items():
        findings = [judge([contrast], evidence)[0] for contrast in contrasts[label]]
        effects = [finding.effect for finding in findings if finding.effect is not None]
        if len(effects) == len(GAPS):
            away = [abs(ours - theirs) for ours, theirs in zip(effects, printed, strict=True)]
            rows.append(
                WrittenGrouping(
                    label=label,
                    sequences=sequences,
                    gaps=tuple(map(WrittenFinding.of, findings)),
                    distance=round(fmean(away), 5),
                )
            )
    return tuple(rows)


def _table1(method: str) -> PrintedRow:
    return find_row({"table": 1, "method": metric_title(method), "gamma": _GAMMA})


def _contrast(first: str, second: str, settings: Mapping[str, int]) -> Contrast:
    shared = {"gamma": _GAMMA, **settings}
    sides = {name: {"method": method, **shared} for name, method in (("a", first), ("b", second))}
    return Contrast.model_validate({**sides, "expect": "greater"})
