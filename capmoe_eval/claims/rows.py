"""Rows of the printed tables, chosen by what they are called in print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from capmoe_eval.names import TITLES, gamma_suffix
from capmoe_eval.report.published import PublishedNumber, published_numbers

AVERAGE: Final = "Avg."
FIELDS: Final = ("version", "table", "model", "method", "variant", "gamma")

Where = Mapping[str, Any]
"""Fields of rows and the values that they must have; ``version`` is v2 where nothing is said, a
list allows several values."""


@dataclass(frozen=True)
class PrintedRow:
    """One row of a printed table: what names it, and its values by column, in the table's units."""

    version: str
    table: int
    model: str
    method: str
    variant: str
    gamma: float | None
    values: Mapping[str, float]

    @property
    def label(self) -> str:
        """The row's name for sentences: ``Table 1 Score γ=1``."""
        parts = [f"Table {self.table}", *([self.version] if self.version == "v1" else [])]
        parts += [self.model, self.method, self.variant]
        if self.gamma is not None and self.method != TITLES["baseline"]:
            parts.append(gamma_suffix(self.gamma, "γ="))
        return " ".join(part for part in parts if part not in ("", "–"))

    @property
    def tasks(self) -> Mapping[str, float]:
        """The values without the average."""
        return {name: value for name, value in self.values.items() if name != AVERAGE}

    @property
    def mean(self) -> float:
        """The mean of the tasks, computed again."""
        return sum(self.tasks.values()) / len(self.tasks)

    def number(self, column: str) -> float:
        """Return a value; the average is computed again, for print truncates some."""
        return self.mean if column == AVERAGE else self.values[column]


@cache
def printed_rows() -> tuple[PrintedRow, ...]:
    """Return every row of both versions, in the order of print."""
    rows: dict[tuple[Any, ...], tuple[PublishedNumber, dict[str, float]]] = {}
    for n in published_numbers():
        key = (n.version, n.table, n.model, n.method, n.variant, n.gamma)
        rows.setdefault(key, (n, {}))[1][n.column] = n.value
    return tuple(
        PrintedRow(n.version, n.table, n.model, n.method, n.variant, n.gamma, values)
        for n, values in rows.values()
    )


def find_rows(where: Where) -> list[PrintedRow]:
    """Return the rows that fit.

    Raises:
        LookupError: If none does.
    """
    wanted = {"version": "v2", **where}
    unknown = set(wanted) - set(FIELDS)
    if unknown:
        raise LookupError(f"rows have no field {', '.join(sorted(unknown))}")
    allowed = {k: v if isinstance(v, list) else [v] for k, v in wanted.items()}
    rows = [row for row in printed_rows() if all(getattr(row, k) in v for k, v in allowed.items())]
    if not rows:
        raise LookupError(f"the paper prints no row {dict(where)}")
    return rows


def find_row(where: Where) -> PrintedRow:
    """Return the one row that fits.

    Raises:
        LookupError: If none does, or several.
    """
    rows = find_rows(where)
    if len(rows) > 1:
        raise LookupError(f"{dict(where)} is no single row: {', '.join(r.label for r in rows)}")
    return rows[0]


def pairs(a: Where, b: Where) -> list[tuple[PrintedRow, PrintedRow]]:
    """Pair rows of two choices by the fields that neither fixes to one value.

    A row without a γ (Expert Drop, or the baseline beside any γ) pairs with every γ.

    Raises:
        LookupError: If a row of ``a`` has no partner or several.
    """
    shared = [f for f in FIELDS if _is_open(a, f) and _is_open(b, f)]
    if {"Baseline", "Expert Drop"} & {str(a.get("method")), str(b.get("method"))}:
        shared = [f for f in shared if f not in ("gamma", "variant")]
    candidates = find_rows(b)
    found = []
    for row in find_rows(a):
        partners = [c for c in candidates if all(getattr(c, f) == getattr(row, f) for f in shared)]
        if len(partners) != 1:
            raise LookupError(f"{row.label} has {len(partners)} partners among {dict(b)}")
        found.append((row, partners[0]))
    return found


def _is_open(where: Where, name: str) -> bool:
    """Whether a choice leaves several values of a field."""
    return isinstance(where.get(name), list) or (name not in where and name != "version")
