"""What could be read from the paper: bars of Figure 1, and the scores of Table 1 by γ.

The speedups of Figures 4 and 5 are in :mod:`capmoe_eval.efficiency.paper`.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from capmoe_eval.names import SCORE, TITLES

# The checkpoints that the paper may have used for Figure 1; Table 1 is OLMoE's base model.
_OLMOE: Final = ("olmoe", "olmoe_instruct")
_TABLE1_MODEL: Final = "olmoe"

FIGURE1_NOTE: Final = (
    "Published bars of Figure 1: heights in the vector graphic (read to 0.001), sorted. They "
    "sum to 82.5, not to 64: each is a peak over batches, ours a mean over all of them."
)
FIGURE6_NOTE: Final = (
    "No number of the paper's Figure 6 could be read. Its text (§5.1): a capacity shortens "
    "experts, permutation and communication, the gate stays as it is; expansion over global "
    "experts makes permutation and communication longer."
)
TABLE1_NOTE: Final = (
    "Published scores: Table 1 (v2; γ=3 from v1), Score, the mean over the same tasks, as printed "
    "to 0.1 points. Figure 12's own curve could not be read."
)


def figure1_bars(model: str, n_experts: int) -> list[float] | None:
    """Return the published bars, highest first, or None where the model is not the paper's."""
    if model not in _OLMOE:
        return None
    bars = sorted((float(bar) for bar in _figures()["fig1_load_svg_vector"]), reverse=True)
    return bars if len(bars) == n_experts else None


def table1_scores(model: str, titles: Sequence[str]) -> dict[str, list[float]] | None:
    """Return the published mean of some tasks by γ under Score, and of the baseline.

    Args:
        model: Key of a model.
        titles: Printed headings of the tasks.

    Returns:
        ``gamma`` and ``value`` (percent), and ``baseline`` with one number; None where the model is
        not Table 1's, or a task is not printed.
    """
    if model != _TABLE1_MODEL:
        return None
    found: dict[float, dict[str, float]] = {}
    baseline: dict[str, float] = {}
    for line in _table1():
        if line["method"] == SCORE:
            # v2 comes after v1 and replaces it where both print a γ.
            found.setdefault(float(line["gamma"]), {})[line["column"]] = float(line["value"])
        elif line["method"] == TITLES["baseline"]:
            baseline[line["column"]] = float(line["value"])
    if any(title not in scores for scores in (*found.values(), baseline) for title in titles):
        return None
    gammas = sorted(found)
    return {
        "gamma": gammas,
        "value": [statistics.fmean(found[gamma][title] for title in titles) for gamma in gammas],
        "baseline": [statistics.fmean(baseline[title] for title in titles)],
    }


@cache
def _figures() -> dict[str, Any]:
    source = resources.files("capmoe_eval.report") / "data" / "figures.json"
    loaded: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return loaded


@cache
def _table1() -> tuple[dict[str, str], ...]:
    source = resources.files("capmoe_eval.report") / "data" / "tables.csv"
    with source.open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["table"] == "1"]
    return tuple(sorted(lines, key=lambda line: line["version"]))
