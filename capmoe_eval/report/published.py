"""The numbers that the paper prints."""

from __future__ import annotations

import csv
import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from capmoe_eval.errors import bad_choice
from capmoe_eval.report.fill import fill
from capmoe_eval.report.layout import Layout, ModelSlot, RowSpec, SettingsLayout, WorkloadLayout
from capmoe_eval.report.layouts import TABLES
from capmoe_eval.report.settings import settings_table
from capmoe_eval.report.table import Entry, Table
from capmoe_eval.report.workload import printed_workloads

_VERSIONS: Final = {"v1": "v1, arXiv", "v2": "v2, ICLR 2026"}


@dataclass(frozen=True)
class PublishedNumber:
    """One cell of a printed table, named as in print.

    Attributes:
        version: "v1" (arXiv) or "v2" (ICLR 2026).
        table: Number of the table in that version.
        model: The model.
        method: The method.
        variant: Granularity, modality strategy, workload or m; empty where there is none.
        gamma: Capacity factor, ``inf`` without a limit, None where it does not apply or is not
            stated.
        column: The task, or "Avg.".
        value: In the table's own units: percent, but fractions in Tables 6 and 7, MME points in
            Table 4 and a speedup in Table 10.
    """

    version: str
    table: int
    model: str
    method: str
    variant: str
    gamma: float | None
    column: str
    value: float


@cache
def published_numbers() -> tuple[PublishedNumber, ...]:
    """Return every printed number of both versions, in the order of print."""
    source = resources.files(__package__) / "data" / "tables.csv"
    with source.open(encoding="utf-8") as file:
        return tuple(
            PublishedNumber(
                version=line["version"],
                table=int(line["table"]),
                model=line["model"],
                method=line["method"],
                variant=line["variant"],
                gamma=float(line["gamma"]) if line["gamma"] else None,
                column=line["column"],
                value=float(line["value"]),
            )
            for line in csv.DictReader(file)
        )


def lookup(
    *,
    version: str,
    table: int,
    model: str,
    method: str,
    column: str,
    variant: str = "",
    gamma: float | None = None,
) -> float:
    """Return a printed number, in the table's own units; the arguments are as in print.

    A row for which the paper states no γ (Expert Drop, Table 6) is found by any ``gamma``.

    Raises:
        LookupError: If the paper prints no such number.
    """
    for stated in (gamma, None):
        value = _index().get((version, table, model, method, variant, stated, column))
        if value is not None:
            return value
    raise LookupError(
        f"Table {table} of {version} prints no {column} for {method} on {model} "
        f"with gamma={gamma}, variant={variant!r}"
    )


def published_table(name: str, version: str = "v2") -> Table:
    """Return a table of the paper with its printed numbers, laid out as measured ones are.

    Averages are as printed: the paper truncates some and rounds others, so they are not computed
    again. Printed numbers have no standard errors.

    Args:
        name: Name of a layout, such as "table1".
        version: "v1" (arXiv) or "v2" (ICLR 2026).

    Raises:
        UsageError: If there is no such layout.
    """
    versions = {layout.version: layout for layout in TABLES if layout.name == name}
    if not versions:
        raise bad_choice("table", name, dict.fromkeys(layout.name for layout in TABLES))
    if version not in versions:
        raise bad_choice("version", version, sorted(versions))
    layout = versions[version]
    if isinstance(layout, SettingsLayout):
        table, note = settings_table(layout), f"As published ({_VERSIONS[version]})."
    elif isinstance(layout, WorkloadLayout):
        table = printed_workloads(layout, printed_speedups(layout))
        note = f"As published ({_VERSIONS[version]})."
    else:
        table = fill(as_printed(layout), layout.paper_models, Printed())
        note = f"Published numbers ({_VERSIONS[version]}), averages as printed."
    return dataclasses.replace(
        table, name=f"{name}_published_{version}", notes=(note, *table.notes)
    )


def printed_speedups(layout: WorkloadLayout) -> dict[str, float]:
    """Return the printed speedup of each workload of a table, by the workload as printed."""
    return {
        place: lookup(
            version=layout.version,
            table=layout.number,
            model=layout.model,
            method=layout.printed_method,
            variant=place,
            gamma=layout.gamma,
            column="Speedup",
        )
        for _, place in layout.workloads
    }


def as_printed(layout: Layout) -> Layout:
    """Return a layout with the headings of the paper, and no γ where the paper states none."""
    tasks = tuple(
        dataclasses.replace(column, heading=column.printed or column.heading)
        for column in layout.tasks
    )
    blocks = layout.blocks
    if not layout.states_gamma:
        blocks = tuple(tuple(dataclasses.replace(s, gamma=None) for s in b) for b in blocks)
    return dataclasses.replace(layout, tasks=tasks, blocks=blocks)


class Printed:
    """Entries from the paper's printed tables."""

    def row(
        self, layout: Layout, slot: ModelSlot, spec: RowSpec, gamma: float | None
    ) -> tuple[Entry, ...]:
        """See :meth:`capmoe_eval.report.source.Source.row`.

        Raises:
            LookupError: If the paper does not print the row.
        """
        headings = [column.printed or column.heading for column in layout.tasks]
        if layout.average is not None:
            headings.append(layout.average)
        return tuple(
            Entry(
                lookup(
                    version=layout.version,
                    table=layout.number,
                    model=slot.title,
                    method=spec.name,
                    variant=spec.printed_variant,
                    gamma=math.inf if spec.method == "baseline" else gamma,
                    column=heading,
                )
            )
            for heading in headings
        )


@cache
def _index() -> dict[tuple[object, ...], float]:
    index: dict[tuple[object, ...], float] = {}
    for number in published_numbers():
        *key, value = dataclasses.astuple(number)
        if index.setdefault(tuple(key), value) != value:
            raise ValueError(f"tables.csv gives two values for {key}")
    return index
