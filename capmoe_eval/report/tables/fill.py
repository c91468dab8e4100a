"""Fill a table's layout with entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.paper.layout import OWN, Layout, ModelSlot, RowSpec
from capmoe_eval.report.tables.notes import table_notes
from capmoe_eval.report.tables.table import Block, Entry, Missing, PairedTest, Row, Table

RowSource: TypeAlias = Callable[
    [Layout, ModelSlot, RowSpec, float | None], Sequence[Entry | Missing]
]
"""Returns the entries of a row for a model at a capacity factor, in display units: one per task,
then the average if there is one."""


def fill(layout: Layout, slots: Sequence[ModelSlot], entries: RowSource) -> Table:
    """Lay out a table for the given models.

    Args:
        layout: The table.
        slots: Its models, in order.
        entries: Where its numbers come from.

    Raises:
        UsageError: If the layout has no place for the models' names and there is not exactly one
            model, or if a row asks for a model's own γ and the model has none.
    """
    names_model = any("{model}" in template for _, template in layout.labels)
    if len(slots) != 1 and not names_model:
        raise UsageError(
            f"{layout.name} is a table of one model, got {len(slots)}: "
            f"{', '.join(slot.key for slot in slots) or 'none'}; lay it out for each by itself"
        )
    columns = tuple(column.heading for column in layout.tasks)
    table = Table(
        name=layout.key,
        title=layout.title.format(model=", ".join(slot.title for slot in slots)),
        caption=layout.caption,
        label_headings=tuple(heading for heading, _ in layout.labels),
        columns=columns if layout.average is None else (*columns, layout.average),
        blocks=tuple(
            Block(tuple(_row(layout, slot, spec, entries) for spec in block))
            for slot in slots
            for block in layout.blocks
        ),
        decimals=layout.decimals,
    )
    _correct([entry.test for entry in table.entries if entry.test])
    return dataclasses.replace(table, notes=tuple(table_notes(layout, slots, table)))


def _row(layout: Layout, slot: ModelSlot, spec: RowSpec, entries: RowSource) -> Row:
    gamma = slot.gamma if spec.gamma == OWN else spec.gamma
    if gamma is None and spec.gamma == OWN:
        raise UsageError(f"{spec.name} on {slot.key} takes the model's own γ, and it has none")
    labels = [
        template.format(
            model=slot.title,
            name=spec.name,
            variant=spec.printed_variant,
            gamma=gamma_text(spec.method, gamma, decimal=True),
            **spec.labels,
        )
        for _, template in layout.labels
    ]
    cells = tuple(entries(layout, slot, spec, gamma))
    return Row(tuple(labels), cells, slot.key, spec.method, gamma_text(spec.method, gamma))


def _correct(tests: Sequence[PairedTest]) -> None:
    """Correct each test's p for the number of tests of the table."""
    if tests:
        from capmoe_eval.paper.statistics import holm

        for test, corrected in zip(tests, holm([test.p for test in tests]), strict=True):
            test.corrected = corrected
