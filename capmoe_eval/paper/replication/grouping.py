"""Find Table 1's gaps by the number of sequences that share a capacity."""

from __future__ import annotations

from statistics import fmean
from typing import Final

from capmoe_eval.experiment.names import metric_title
from capmoe_eval.paper.contrasts import Contrast, judge
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.printed import AVERAGE, find_row
from capmoe_eval.paper.verdict_file import WrittenFinding, WrittenGrouping

GAPS: Final = (("score", "random"), ("random", "reverse_order"), ("reverse_order", "order"))
"""The ways to keep tokens that are neighbours in Table 1, the better first."""
GAMMA: Final = 1.0
BATCHES: Final = (4, 16, 64)
"""Sequences on one rank; before them stands the model's own deployment."""


def grouping(evidence: Evidence) -> tuple[WrittenGrouping, ...]:
    """Return the gaps between the ways to keep tokens for each number of sequences per rank.

    The first row is what Table 1 prints for OLMoE; the others are measured, if recorded.
    ``distance`` is the mean distance of a row's gaps from the printed ones, in points.
    """
    printed = [_printed(first) - _printed(second) for first, second in GAPS]
    in_print = tuple(WrittenFinding(label="as printed", effect=round(g, 2)) for g in printed)
    rows = [WrittenGrouping(label="Table 1, OLMoE", gaps=in_print)]
    for size in (None, *BATCHES):
        found = [judge([_contrast(*gap, size)], evidence)[0] for gap in GAPS]
        effects = [finding.effect for finding in found if finding.effect is not None]
        if len(effects) == len(GAPS):
            away = [abs(mine - theirs) for mine, theirs in zip(effects, printed, strict=True)]
            rows.append(
                WrittenGrouping(
                    label=f"{size} on one rank" if size else "two on each rank",
                    sequences=size or 2,
                    gaps=tuple(map(WrittenFinding.of, found)),
                    distance=round(fmean(away), 5),
                )
            )
    return tuple(rows)


def _printed(method: str) -> float:
    return find_row({"table": 1, "method": metric_title(method), "gamma": GAMMA}).number(AVERAGE)


def _contrast(first: str, second: str, size: int | None) -> Contrast:
    shared = {"gamma": GAMMA} | ({"ep_size": 1, "batch_size": size} if size else {})
    sides = {name: {"method": method, **shared} for name, method in (("a", first), ("b", second))}
    return Contrast.model_validate({**sides, "expect": "greater"})
