"""The one reader of what the paper prints: its tables, figures and deployments.

``data/tables.csv`` has every cell of the result tables, ``data/figures.json`` the values that could
be read from the figures.
"""

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from importlib import resources
from operator import getitem
from typing import Any, Final, NamedTuple

from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import gamma_suffix

_DATA: Final = resources.files(__package__) / "data"

AVERAGE: Final = "Avg."

Where = Mapping[str, Any]
"""Fields of rows and the values that they must have; ``version`` is v2 where nothing is said, a
list allows several values."""


class PrintedRow(NamedTuple):
    """One row of a printed table, named as in print."""

    version: str  # "v1" (arXiv) or "v2" (ICLR 2026)
    table: int  # its number in that version
    model: str
    method: str
    variant: str  # granularity, modality strategy, workload or m; empty where there is none
    gamma: float | None  # ``inf`` without a limit, None where it is not stated or does not apply
    # By column (a task, or "Avg."), in the table's own units: percent, but fractions in Tables 6
    # and 7, MME points in Table 4 and a speedup in Table 10.
    values: Mapping[str, float]

    @property
    def label(self) -> str:
        """The row's name for sentences: ``Table 1 Score γ=1``."""
        version = "v1" if self.version == "v1" else ""
        gamma = "" if self.gamma == math.inf else gamma_suffix(self.gamma, "γ=")
        parts = (f"Table {self.table}", version, self.model, self.method, self.variant, gamma)
        return " ".join(part for part in parts if part not in ("", "–"))

    @property
    def point(self) -> float:
        """A point of accuracy in the table's units: Tables 6 and 7 print fractions."""
        return 0.01 if self.table in (6, 7) else 1.0

    @property
    def tasks(self) -> Mapping[str, float]:
        """The values without the average."""
        return {name: value for name, value in self.values.items() if name != AVERAGE}

    @property
    def mean(self) -> float:
        """The mean of the tasks, computed again."""
        return statistics.fmean(self.tasks.values())

    def number(self, column: str) -> float:
        """Return a value; the average is computed again, for print truncates some."""
        return self.mean if column == AVERAGE else self.values[column]


FIELDS: Final = PrintedRow._fields[:-1]
"""The fields that name a row."""


@cache
def printed_rows() -> tuple[PrintedRow, ...]:
    """Return every row of both versions, in the order of print."""
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    with (_DATA / "tables.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            table, gamma = int(line["table"]), float(line["gamma"]) if line["gamma"] else None
            names = line["model"], line["method"], line["variant"]
            values = rows.setdefault((line["version"], table, *names, gamma), {})
            values[line["column"]] = float(line["value"])
    return tuple(PrintedRow._make((*key, values)) for key, values in rows.items())


def find_rows(where: Where) -> list[PrintedRow]:
    """Return the rows that fit, or raise LookupError if none does."""
    fields = {"version": "v2", **where}
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise LookupError(f"rows have no field {', '.join(sorted(unknown))}")
    allowed = {k: v if isinstance(v, list) else [v] for k, v in fields.items()}
    rows = [row for row in printed_rows() if all(getattr(row, k) in v for k, v in allowed.items())]
    if not rows:
        raise LookupError(f"the paper prints no row {dict(where)}")
    return rows


def find_row(where: Where) -> PrintedRow:
    """Return the one row that fits, or raise LookupError if none does, or several."""
    rows = find_rows(where)
    if len(rows) > 1:
        raise LookupError(f"{dict(where)} is no single row: {', '.join(r.label for r in rows)}")
    return rows[0]


@cache
def _figures() -> Any:
    return json.loads((_DATA / "figures.json").read_text(encoding="utf-8"))


def figure(*path: str | int) -> Any:
    """Return the values read from a figure, under a path of keys, or raise LookupError."""
    return reduce(getitem, path, _figures())


def published_note(of: str) -> str:
    """Return what must be said of published values beside ours: of figure1, figure6 or table1."""
    return read_data(__package__, "data/notes.yaml", dict[str, str])[of]


def figure1_bars(model: str, n_experts: int) -> list[float] | None:
    """Return the published bars, highest first, or None where the model is not the paper's."""
    bars = sorted(map(float, figure("fig1_load_svg_vector")), reverse=True)
    # The checkpoints that the paper may have used.
    return bars if model in ("olmoe", "olmoe_instruct") and len(bars) == n_experts else None


def table1_scores(model: str, titles: Sequence[str]) -> dict[str, list[float]] | None:
    """Return the published means of tasks, by their printed headings, under Score.

    They are ``gamma`` and ``value`` (percent), and ``baseline`` with one number; None where the
    model is not Table 1's, or a task is not printed.
    """
    rows = sorted(find_rows({"table": 1, "version": ["v1", "v2"]}), key=lambda row: row.version)
    if model != "olmoe" or not rows[0].values.keys() >= set(titles):  # the base model
        return None
    # v2 comes after v1 and replaces it where both print a γ.
    score, baseline = (
        {
            row.gamma: statistics.fmean(row.values[title] for title in titles)
            for row in sorted(rows, key=lambda row: row.gamma or 0)
            if row.method == method and row.gamma is not None
        }
        for method in ("Score", "Baseline")
    )
    return {"gamma": [*score], "value": [*score.values()], "baseline": [*baseline.values()]}
