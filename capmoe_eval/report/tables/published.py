"""The paper's tables as it prints them."""

from __future__ import annotations

import dataclasses
from typing import Final

from capmoe_eval.paper.layout import (
    Layout,
    ModelSlot,
    QueryLayout,
    RowSpec,
    SettingsLayout,
    WorkloadLayout,
)
from capmoe_eval.paper.tables import printed_layout
from capmoe_eval.report.tables.fill import fill
from capmoe_eval.report.tables.others import printed_query, printed_workloads, settings_table
from capmoe_eval.report.tables.table import Entry, Table

VERSIONS: Final = {"v1": "v1, arXiv", "v2": "v2, ICLR 2026"}


def published_table(name: str, version: str = "v2") -> Table:
    """Return a table of the paper with its printed numbers, laid out as measured ones are.

    Averages are as printed: the paper truncates some and rounds others, so they are not computed
    again. Printed numbers have no standard errors. A table that is not in that version is a
    UsageError.
    """
    layout = printed_layout(name, version)
    note = f"As published ({VERSIONS[version]})."
    match layout:
        case SettingsLayout():
            table = settings_table(layout)
        case WorkloadLayout():
            table = printed_workloads(layout)
        case QueryLayout():
            table = printed_query(layout)
        case Layout():
            table = fill(_as_printed(layout), layout.paper_models, printed_row)
            note = f"Published numbers ({VERSIONS[version]}), averages as printed."
    return dataclasses.replace(
        table, name=f"{name}_published_{version}", notes=(note, *table.notes)
    )


def _as_printed(layout: Layout) -> Layout:
    """Return a layout with the headings and rows of the paper, and no γ where it states none."""
    tasks = tuple(
        dataclasses.replace(column, heading=column.printed or column.heading)
        for column in layout.tasks
    )
    blocks = tuple(tuple(spec for spec in block if spec.in_print) for block in layout.blocks)
    if not layout.states_gamma:
        blocks = tuple(tuple(dataclasses.replace(s, gamma=None) for s in b) for b in blocks)
    return dataclasses.replace(layout, tasks=tasks, blocks=blocks)


def printed_row(layout: Layout, slot: ModelSlot, spec: RowSpec) -> list[Entry]:
    """Return a row's printed entries, or raise LookupError if the paper does not print it."""
    row = layout.printed(slot, spec)
    headings = [column.printed or column.heading for column in layout.tasks]
    if layout.average is not None:
        headings.append(layout.average)
    return [Entry(row.values[heading]) for heading in headings]
