"""The notes below a table: how its numbers were averaged, and what its marks mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capmoe_eval.experiment.names import gamma_number
from capmoe_eval.paper.layout import OWN, Layout, ModelSlot
from capmoe_eval.report.tables.table import ALPHA, Entry, Table

_PUBLISHED = (
    "published: what the paper prints, and in parentheses our difference to it and its z: over our "
    "standard error and the sampling error of the printed value on as many documents, as if they "
    "were other documents; on the same ones z is too small."
)


def table_notes(layout: Layout, slots: Sequence[ModelSlot], table: Table) -> Iterator[str]:
    """Yield the notes on a filled table, in the order in which they are printed."""
    yield from layout.notes
    specs = [spec for block in layout.blocks for spec in block]
    if any(spec.gamma == OWN for spec in specs):
        told = [
            f"{slot.title} {gamma_number(slot.gamma, decimal=True)}"
            for slot in slots
            if slot.gamma is not None
        ]
        yield f"γ: {', '.join(told)}."
    used = {value for spec in specs for value in spec.knobs.values()}
    for slot in slots:
        told = [f"{symbol} = {n}" for symbol, n in slot.symbols.items() if symbol in used]
        if told:
            yield f"On {slot.title}, {', '.join(told)}."
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
            f"tasks), Holm-corrected for the {count} tests of this table."
        )
    if untested:
        noun = "entry has" if untested == 1 else "entries have"
        yield f"{untested} {noun} no paired test: no baseline on the same documents."
