"""Checks of claims by records: published values and invariants."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.paper.layout import ALL_TASKS, LAYOUTS
from capmoe_eval.paper.printed import PrintedRow, find_rows
from capmoe_eval.paper.statistics import binomial_tail

from capmoe_report.evidence import Evidence, Side
from capmoe_report.margins import Expectation
from capmoe_report.verdicts import BEYOND, LEVEL, Finding, Outcome

_TASKS: Final = {column.heading: column.task for column in ALL_TASKS}


def check_value(where: Mapping[str, Any], evidence: Evidence) -> list[Finding]:
    """Compare rows of a printed table with records of the same checkpoints, number by number.

    z is the difference over the standard error of a difference of two runs, each with ours: the
    paper prints none, and it asked as many documents. Only profile paper has these checkpoints. A
    row that the paper does not print is a LookupError.
    """
    rows = find_rows(where)
    if evidence.profile != "paper":
        names = ", ".join(dict.fromkeys(row.model for row in rows))
        text = f"Needs the weights of {names}: profile=paper compares."
        return [Finding(verdict=Outcome.IMPOSSIBLE, text=text)]
    findings: list[Finding] = []
    # By number: the size of its z, its difference and our standard error.
    compared: list[tuple[float, float, float]] = []
    for row in rows:
        model, side = _counterpart(row)
        cells = evidence.pick(side, model)
        for heading, printed in row.tasks.items():
            of_task = cells[cells["task"] == _TASKS[heading]]
            if of_task.empty or of_task["stderr"].isna().any():
                continue
            ours, error = (100 * of_task[name].mean() for name in ("value", "stderr"))
            z = (ours - printed) / (math.sqrt(2) * error) if error else math.inf
            label = f"{row.label} {heading}: printed {printed:g}, z = {z:+.2f}"
            about: dict[str, Any] = {"effect": ours, "records": (of_task["path"].iloc[0],)}
            finding = Finding(label=label, verdict=Outcome.UNDECIDED, unit="percent", **about)
            findings.append(finding)
            compared.append((abs(z), ours - printed, error))
    numbers = sum(len(row.tasks) for row in rows)
    if not compared:
        text = f"None of {numbers} numbers has a record."
        return [Finding(verdict=Outcome.ABSENT, text=text)]
    sizes, gaps, errors = zip(*compared, strict=True)
    beyond = sum(z >= BEYOND for z in sizes)
    worst = findings[sizes.index(max(sizes))]
    mean = sum(gaps) / len(gaps)
    reach = BEYOND * math.sqrt(2 * sum(error**2 for error in errors)) / len(gaps)
    text = (
        f"{len(compared)} of {numbers} numbers have records; {beyond} differ by {BEYOND} standard "
        f"errors or more, {0.05 * len(compared):.1f} would by chance; the mean difference is "
        f"{mean:+.2f} ± {reach:.2f} points. Furthest: {worst.label}, ours {worst.effect:.1f}."
    )
    # A whole table fails if too many numbers lie beyond; it holds only if, besides, the mean
    # difference is known to be within the margin.
    outcome = Outcome.UNDECIDED
    if len(compared) == numbers:
        tail = binomial_tail(beyond, numbers, 0.05)
        within = Expectation.of({"within": "comparable"}).judge(mean - reach, mean + reach)
        outcome = Outcome.FAILS if tail < LEVEL else within
    return [Finding(verdict=outcome, text=text), *findings]


def _counterpart(row: PrintedRow) -> tuple[str, Side]:
    """Return the model and the side that a printed row is of, by the layout of its table."""
    for layout in LAYOUTS:
        for slot, spec in itertools.product(layout.paper_models, itertools.chain(*layout.blocks)):
            with contextlib.suppress(LookupError):
                if layout.printed(slot, spec) is row:
                    fields = {"method": spec.method, "gamma": spec.gamma_on(slot), **spec.knobs}
                    return slot.key, Side.model_validate(fields)
    raise LookupError(f"{row.label}: no counterpart here")


def check_invariant(name: str, evidence: Evidence) -> list[Finding]:
    """Return whether an invariant held in every record to which it applies.

    One that no record can have is a ValueError.
    """
    if name not in Proofs.model_fields:
        raise ValueError(f"invariant: {name!r} is none of {', '.join(Proofs.model_fields)}")
    cells = evidence.results.cells
    passed = cells[f"proofs.{name}"]
    kept, broken = (cells["path"][passed.isin([is_kept])] for is_kept in (True, False))
    if kept.empty and broken.empty:
        return [Finding(verdict=Outcome.ABSENT, text=f"No record to which {name} applies.")]
    outcome = Outcome.HOLDS if broken.empty else Outcome.FAILS
    text = f"{name}: kept in {len(kept)} records, broken in {len(broken)}."
    about: dict[str, Any] = {"effect": float(len(kept)), "records": tuple(broken)}
    return [
        Finding(verdict=outcome, text=text),
        Finding(label=name, verdict=outcome, unit="records", **about),
    ]
