"""Fill a table's layout with entries, and write the notes below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_column, gamma_text
from capmoe_eval.paper.layout import OWN, Layout, ModelSlot, RowSpec
from capmoe_eval.report.tables.table import ALPHA, Entry, Missing, Row, Table

RowSource: TypeAlias = Callable[[Layout, ModelSlot, RowSpec], Sequence[Entry | Missing]]
"""The entries of a row for a model, in display units: one per task, then the average."""

_PUBLISHED = (
    "published: what the paper prints, and in parentheses our difference to it and its z: over our "
    "standard error and the sampling error of the printed value on as many documents, as if they "
    "were other documents; on the same ones z is too small."
)


def fill(layout: Layout, slots: Sequence[ModelSlot], entries: RowSource) -> Table:
    """Lay out a table for the given models, in order, with numbers from a source.

    Several models in a layout without a place for their names are a UsageError, and so is a model
    without a γ of its own in a row that asks for it.
    """
    names_model = any("{model}" in template for _, template in layout.labels)
    if len(slots) != 1 and not names_model:
        raise UsageError(
            f"{layout.name} is a table of one model, got {len(slots)}: "
            f"{', '.join(slot.key for slot in slots) or 'none'}; lay it out for each by itself"
        )
    columns = [column.heading for column in layout.tasks]
    table = Table.of(
        layout,
        [heading for heading, _ in layout.labels],
        columns if layout.average is None else [*columns, layout.average],
        [
            [_row(layout, slot, spec, entries) for spec in block]
            for slot in slots
            for block in layout.blocks
        ],
        decimals=layout.decimals,
        model=", ".join(slot.title for slot in slots),
    )
    if tests := [entry.test for entry in table.entries if entry.test]:
        from capmoe_eval.paper.statistics import holm

        for test, corrected in zip(tests, holm([test.p for test in tests]), strict=True):
            test.corrected = corrected
    return dataclasses.replace(table, notes=tuple(_notes(layout, slots, table)))


def _row(layout: Layout, slot: ModelSlot, spec: RowSpec, entries: RowSource) -> Row:
    gamma = spec.gamma_on(slot)
    labels = [
        template.format(
            model=slot.title,
            name=spec.name,
            variant=spec.printed_variant,
            gamma=gamma_column(spec.method, gamma, decimal=True),
            **spec.labels,
        )
        for _, template in layout.labels
    ]
    cells = tuple(entries(layout, slot, spec))
    return Row(tuple(labels), cells, slot.key, spec.method, gamma_column(spec.method, gamma))


def _notes(layout: Layout, slots: Sequence[ModelSlot], table: Table) -> Iterator[str]:
    """Yield the notes on a filled table, in the order in which they are printed."""
    yield from layout.notes
    specs = [spec for block in layout.blocks for spec in block]
    if any(spec.gamma == OWN for spec in specs):
        known = [(slot.title, slot.gamma) for slot in slots if slot.gamma is not None]
        gammas = [f"{title} {gamma_text(gamma, decimal=True)}" for title, gamma in known]
        yield f"γ: {', '.join(gammas)}."
    used = {value for spec in specs for value in spec.knobs.values()}
    for slot in slots:
        symbols = [f"{symbol} = {n}" for symbol, n in slot.symbols.items() if symbol in used]
        if symbols:
            yield f"On {slot.title}, {', '.join(symbols)}."
    yield from _seed_note(table)
    yield from _document_note(table)
    yield from _test_notes(table)
    if any(entry.published for entry in table.entries):
        yield _PUBLISHED


def _seed_note(table: Table) -> Iterator[str]:
    """Yield over how many seeds entries are means."""
    counts = sorted({len(entry.seeds) for entry in table.entries if entry.seeds})
    if counts:
        number, noun = " or ".join(map(str, counts)), "seed" if counts == [1] else "seeds"
        note = f"Entries of a random method are means over {number} {noun}."
        if counts[0] == 1:
            note += " With one seed the standard error leaves out the spread between seeds."
        yield note


def _document_note(table: Table) -> Iterator[str]:
    """Yield the number of documents of each column."""
    parts = []
    for index, heading in enumerate(table.columns):
        entries = (row.entries[index] for row in table.rows)
        counts = sorted({e.documents for e in entries if isinstance(e, Entry) and e.documents})
        if counts:
            parts.append(f"{heading} {' or '.join(f'{count:,}' for count in counts)}")
    if parts:
        yield f"Documents: {', '.join(parts)}."


def _test_notes(table: Table) -> Iterator[str]:
    """Yield what the marks of paired tests mean, and how many entries have none."""
    count = sum(entry.test is not None for entry in table.entries)
    untested = sum(bool(entry.untested) for entry in table.entries)
    if count:
        yield (
            f"▼ worse, ▲ better than the same model's baseline: p < {ALPHA} in a paired test over "
            "the documents (McNemar's exact test; random sign flips for averages over seeds or "
            "tasks, and for scores that are fractions), Holm-corrected for the "
            f"{count} tests of this table."
        )
    if untested:
        noun = "entry has" if untested == 1 else "entries have"
        yield f"{untested} {noun} no paired test: no baseline on the same documents."
