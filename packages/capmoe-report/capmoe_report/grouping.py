"""Table 1's gaps between ways to keep tokens, by the sequences that share a capacity."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Final

from capmoe_eval.experiment.names import metric_title
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.printed import find_row

from capmoe_report.contrasts import Contrast, judge_contrasts
from capmoe_report.evidence import Evidence
from capmoe_report.verdicts import Finding, Grouping, Outcome

GAPS: Final = (("score", "random"), ("random", "reverse_order"), ("reverse_order", "order"))
"""The ways to keep tokens that are neighbours in Table 1, the better first."""
_GAMMA: Final = 1.0
_SEQUENCES: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "two on each rank": (2, {"batch_size": 16}),
    **{f"{size} on one rank": (size, {"ep_size": 1, "batch_size": size}) for size in (4, 16, 64)},
}  # the sequences that share a capacity, and the settings of their evaluations


def grouping(evidence: Evidence) -> tuple[Grouping, ...]:
    """Return the gaps between the ways to keep tokens for each number of sequences per rank.

    The first row is what Table 1 prints for OLMoE on the tasks that all others have; these are
    measured, if recorded. ``distance`` is the mean distance of a row's gaps from the printed ones,
    in points.
    """
    findings = {
        label: [judge_contrasts([_contrast(*gap, settings)], evidence)[0] for gap in GAPS]
        for label, (_, settings) in _SEQUENCES.items()
    }
    contrasts = [_contrast(*gap, at) for _, at in _SEQUENCES.values() for gap in GAPS]
    effects = [evidence.effect(contrast.first, contrast.second) for contrast in contrasts]
    of_models = [set(tasks) for effect in effects for tasks in effect.tasks.values()]
    columns = {column.printed or column.heading: column.task for column in ALL_TASKS}
    table1 = {
        method: find_row({"table": 1, "method": metric_title(method), "gamma": _GAMMA}).tasks
        for gap in GAPS
        for method in gap
    }
    shared = [
        heading
        for heading in table1["score"]
        if all(columns[heading] in tasks for tasks in of_models)
    ]
    if not shared:
        return ()
    means = {method: fmean(row[heading] for heading in shared) for method, row in table1.items()}
    printed = [means[first] - means[second] for first, second in GAPS]
    in_print = tuple(
        Finding(label="as printed", verdict=Outcome.NONE, unit="points", effect=round(gap, 2))
        for gap in printed
    )
    rows = [Grouping(label=f"Table 1, OLMoE: {', '.join(shared)}", gaps=in_print)]
    for label, gaps in findings.items():
        measured = [gap.effect for gap in gaps if gap.effect is not None]
        if len(measured) == len(GAPS):
            away = [abs(ours - theirs) for ours, theirs in zip(measured, printed, strict=True)]
            rows.append(
                Grouping(
                    label=label,
                    sequences=_SEQUENCES[label][0],
                    gaps=tuple(gaps),
                    distance=fmean(away),
                )
            )
    return tuple(rows)


def _contrast(first: str, second: str, settings: Mapping[str, int]) -> Contrast:
    shared = {"gamma": _GAMMA, **settings}
    sides = {name: {"method": method, **shared} for name, method in (("a", first), ("b", second))}
    return Contrast.model_validate({**sides, "expect": "greater"})
