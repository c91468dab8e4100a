"""Published values of the paper's own checkpoints beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from capmoe_eval.experiment.names import METHODS
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.printed import PrintedRow, find_rows
from capmoe_eval.paper.tables import ALL_TASKS
from capmoe_eval.paper.verdicts import Finding, Outcome

MODELS: Final = {
    "OLMoE": "olmoe",
    "OLMoE-Instruct": "olmoe_instruct",
    "Qwen1.5-MoE-Chat": "qwen1_5_moe_chat",
    "DeepSeek-V2-Lite-Chat": "deepseek_v2_lite_chat",
    "Mixtral-8×7B-Instruct": "mixtral_8x7b_instruct",
    "Qwen3-MoE": "qwen3_30b_a3b",
}
"""Printed name → key of the model in profile paper."""
_TASKS: Final = {column.heading: column.task for column in ALL_TASKS}
_BEYOND: Final = 1.96


def check(where: Mapping[str, Any], evidence: Evidence) -> CheckResult:
    """Compare rows of a printed table with records of the same checkpoints, number by number.

    z is the difference over the standard error of a difference of two runs, each with ours: the
    paper prints none, and it asked as many documents. Only profile paper has these checkpoints.

    Raises:
        LookupError: If the paper prints no such row.
    """
    rows = find_rows(where)
    if evidence.profile != "paper":
        names = ", ".join(dict.fromkeys(row.model for row in rows))
        return CheckResult(
            "value", Outcome.IMPOSSIBLE, f"Needs the weights of {names}: profile=paper compares."
        )
    compared: list[tuple[float, str, float, float, Record]] = []
    for row in rows:
        side, model = _side(row), MODELS[row.model]
        found = evidence.find(side, model)
        for heading, printed in row.tasks.items():
            records = found.get(_TASKS[heading], [])
            if not records or any(record.stderr is None for record in records):
                continue
            ours = 100 * sum(record.value for record in records) / len(records)
            error = 100 * sum(record.stderr or 0.0 for record in records) / len(records)
            z = (ours - printed) / (math.sqrt(2) * error) if error else math.inf
            compared.append((z, f"{row.label} {heading}", ours, printed, records[0]))
    cells = sum(len(row.tasks) for row in rows)
    if not compared:
        return CheckResult("value", Outcome.ABSENT, f"None of {cells} numbers has a record.")
    beyond = [item for item in compared if abs(item[0]) >= _BEYOND]
    worst = max(compared, key=lambda item: abs(item[0]))
    text = (
        f"{len(compared)} of {cells} numbers have records; {len(beyond)} differ by {_BEYOND} "
        f"standard errors or more, {0.05 * len(compared):.1f} would by chance. Furthest: "
        f"{worst[1]}, ours {worst[2]:.1f}, printed {worst[3]:g}, z = {worst[0]:+.1f}."
    )
    findings = tuple(
        Finding(
            f"{label}: printed {printed:g}, z = {z:+.2f}",
            Outcome.UNDECIDED,
            ours,
            unit="percent",
            records=(str(record.path),),
        )
        for z, label, ours, printed, record in compared
    )
    return CheckResult("value", _outcome(len(beyond), len(compared), cells), text, findings)


def _outcome(beyond: int, compared: int, cells: int) -> Outcome:
    """Judge a table by how many numbers lie beyond: a binomial test at 5 %; half-filled is open."""
    if compared < cells:
        return Outcome.UNDECIDED
    from scipy.stats import binomtest

    tail = binomtest(beyond, cells, 0.05, alternative="greater").pvalue
    return Outcome.HOLDS if tail >= 0.05 else Outcome.FAILS


def _side(row: PrintedRow) -> Side:
    """Return the side that a printed row is of.

    Raises:
        LookupError: If the row's method or model has no counterpart here.
    """
    if row.method not in METHODS or row.model not in MODELS:
        raise LookupError(f"{row.label}: no counterpart here")
    method = METHODS[row.method]
    gamma = None if method in ("baseline", "expert_drop") else row.gamma
    knobs: dict[str, Any] = {}
    if row.variant == "Device":
        knobs["granularity"] = "device"
    if row.variant.startswith("m="):
        knobs = {"candidates": "ranked", "m": row.variant.split(",")[0].removeprefix("m=")}
        if row.variant.endswith("w/ max"):
            knobs["max_k"] = True
    return Side(method=method, gamma=gamma, **knobs)
