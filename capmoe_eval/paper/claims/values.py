"""Published values of the paper's own checkpoints beside ours."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.printed import PrintedRow, find_rows
from capmoe_eval.paper.statistics import binomial_tail
from capmoe_eval.paper.tables import ALL_TASKS, LAYOUTS
from capmoe_eval.paper.verdicts import BEYOND, LEVEL, Finding, Outcome

_TASKS: Final = {column.heading: column.task for column in ALL_TASKS}


def check(where: Mapping[str, Any], evidence: Evidence) -> CheckResult:
    """Compare rows of a printed table with records of the same checkpoints, number by number.

    z is the difference over the standard error of a difference of two runs, each with ours: the
    paper prints none, and it asked as many documents. Only profile paper has these checkpoints. A
    row that the paper does not print is a LookupError.
    """
    rows = find_rows(where)
    if evidence.profile != "paper":
        names = ", ".join(dict.fromkeys(row.model for row in rows))
        text = f"Needs the weights of {names}: profile=paper compares."
        return CheckResult("value", Outcome.IMPOSSIBLE, text)
    findings: list[Finding] = []
    # By number: the size of its z, its difference and our standard error.
    compared: list[tuple[float, float, float]] = []
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
            label = f"{row.label} {heading}: printed {printed:g}, z = {z:+.2f}"
            path = str(records[0].path)
            findings.append(
                Finding(label, Outcome.UNDECIDED, ours, unit="percent", records=(path,))
            )
            compared.append((abs(z), ours - printed, error))
    cells = sum(len(row.tasks) for row in rows)
    if not compared:
        return CheckResult("value", Outcome.ABSENT, f"None of {cells} numbers has a record.")
    sizes, gaps, errors = zip(*compared, strict=True)
    beyond = sum(z >= BEYOND for z in sizes)
    worst = findings[sizes.index(max(sizes))]
    mean = sum(gaps) / len(gaps)
    reach = BEYOND * math.sqrt(2 * sum(error**2 for error in errors)) / len(gaps)
    text = (
        f"{len(compared)} of {cells} numbers have records; {beyond} differ by {BEYOND} standard "
        f"errors or more, {0.05 * len(compared):.1f} would by chance; the mean difference is "
        f"{mean:+.2f} ± {reach:.2f} points. Furthest: {worst.label}, ours {worst.effect:.1f}."
    )
    # A whole table fails if too many numbers lie beyond; it holds only if, besides, the mean
    # difference is known to be within the margin.
    outcome = Outcome.UNDECIDED
    if len(compared) == cells:
        tail = binomial_tail(beyond, cells, 0.05)
        within = Expectation.of({"within": "comparable"}).judge(mean - reach, mean + reach)
        outcome = Outcome.FAILS if tail < LEVEL else within
    return CheckResult("value", outcome, text, tuple(findings))


def _asked(row: PrintedRow) -> tuple[str, Side]:
    """Return the model and the side that a printed row is of, by the layout of its table."""
    for layout in LAYOUTS:
        for slot, spec in itertools.product(layout.paper_models, itertools.chain(*layout.blocks)):
            with contextlib.suppress(LookupError):
                if layout.printed(slot, spec) is row:
                    asked = {"method": spec.method, "gamma": spec.gamma_on(slot), **spec.knobs}
                    return slot.key, Side.model_validate(asked)
    raise LookupError(f"{row.label}: no counterpart here")
