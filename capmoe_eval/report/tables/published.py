"""The paper's tables as it prints them."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from capmoe_eval.errors import bad_choice
from capmoe_eval.paper.layout import Layout, ModelSlot, RowSpec, SettingsLayout, WorkloadLayout
from capmoe_eval.paper.printed import lookup
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.tables.fill import fill
from capmoe_eval.report.tables.settings import settings_table
from capmoe_eval.report.tables.table import Entry, Table
from capmoe_eval.report.tables.workload import printed_workloads

_VERSIONS: Final = {"v1": "v1, arXiv", "v2": "v2, ICLR 2026"}


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
        """See :meth:`capmoe_eval.report.tables.source.Source.row`.

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
