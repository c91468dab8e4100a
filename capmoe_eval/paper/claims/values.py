"""Published values of the paper's own checkpoints beside ours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.layout import OWN
from capmoe_eval.paper.printed import PrintedRow, find_rows
from capmoe_eval.paper.tables import ALL_TASKS, LAYOUTS
from capmoe_eval.paper.verdicts import LEVEL, Finding, Outcome

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
    compared: list[tuple[float, str, Finding]] = []
    gaps: list[tuple[float, float]] = []
    for row in rows:
        model, side = _asked(row)
        found = evidence.find(side, model)
        for heading, printed in row.tasks.items():
            records = found.get(_TASKS[heading], [])
            if not records or any(record.stderr is None for record in records):
                continue
            ours = 100 * sum(record.value for record in records) / len(records)
            error = 100 * sum(record.stderr or 0.0 for record in records) / len(records)
            z = (ours - printed) / (math.sqrt(2) * error) if error else math.inf
            finding = Finding(
                f"{row.label} {heading}: printed {printed:g}, z = {z:+.2f}",
                Outcome.UNDECIDED,
                ours,
                unit="percent",
                records=(str(records[0].path),),
            )
            numbers = f"{row.label} {heading}, ours {ours:.1f}, printed {printed:g}, z = {z:+.1f}"
            compared.append((abs(z), numbers, finding))
            gaps.append((ours - printed, error))
    cells = sum(len(row.tasks) for row in rows)
    if not compared:
        return CheckResult("value", Outcome.ABSENT, f"None of {cells} numbers has a record.")
    beyond = sum(z >= _BEYOND for z, _, _ in compared)
    _, worst, _ = max(compared, key=lambda item: item[0])
    mean = sum(gap for gap, _ in gaps) / len(gaps)
    reach = _BEYOND * math.sqrt(2 * sum(error**2 for _, error in gaps)) / len(gaps)
    text = (
        f"{len(compared)} of {cells} numbers have records; {beyond} differ by {_BEYOND} standard "
        f"errors or more, {0.05 * len(compared):.1f} would by chance; the mean difference is "
        f"{mean:+.2f} ± {reach:.2f} points. Furthest: {worst}."
    )
    findings = tuple(finding for _, _, finding in compared)
    within = Expectation.of({"within": "comparable"}).judge(mean - reach, mean + reach)
    outcome = _outcome(beyond, cells, within) if len(compared) == cells else Outcome.UNDECIDED
    return CheckResult("value", outcome, text, findings)


def _outcome(beyond: int, cells: int, mean: Outcome) -> Outcome:
    """Judge a whole table: it fails if too many numbers lie beyond (binomial test at 5 %).

    It holds only if, besides, the mean difference is known to be within the margin.
    """
    from scipy.stats import binomtest

    tail = binomtest(beyond, cells, 0.05, alternative="greater").pvalue
    return Outcome.FAILS if tail < LEVEL else mean


def _asked(row: PrintedRow) -> tuple[str, Side]:
    """Return the model and the side that a printed row is of, by the layout of its table.

    Raises:
        LookupError: If no layout has the row.
    """
    for layout in LAYOUTS:
        if (layout.version, layout.number) != (row.version, row.table):
            continue
        for slot, spec in itertools.product(layout.paper_models, itertools.chain(*layout.blocks)):
            gamma = slot.gamma if spec.gamma == OWN else spec.gamma
            named = (slot.title, spec.name, spec.printed_variant)
            if named == (row.model, row.method, row.variant) and (
                gamma == row.gamma or spec.method == "baseline"
            ):
                asked = {"method": spec.method, "gamma": gamma, **spec.knobs}
                return slot.key, Side.model_validate(asked)
    raise LookupError(f"{row.label}: no counterpart here")
