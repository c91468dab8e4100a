"""The sentences below a table: what its numbers are means of, and what its marks mean."""

from __future__ import annotations

from collections.abc import Sequence

from capmoe_eval.experiment.names import gamma_number
from capmoe_eval.paper.layout import OWN, Layout, ModelSlot
from capmoe_eval.report.tables.table import ALPHA, Block, Entry


def gamma_note(layout: Layout, slots: Sequence[ModelSlot]) -> list[str]:
    """Return the γ of each model, where rows take their models' own."""
    if all(spec.gamma != OWN for block in layout.blocks for spec in block):
        return []
    told = [
        f"{slot.title} {gamma_number(slot.gamma, decimal=True)}"
        for slot in slots
        if slot.gamma is not None
    ]
    return [f"γ: {', '.join(told)}."]


def symbol_note(layout: Layout, slots: Sequence[ModelSlot]) -> list[str]:
    """Return what the symbols of the rows' knobs stand for on each model."""
    used = {v for block in layout.blocks for spec in block for v in spec.knobs.values()}
    notes = []
    for slot in slots:
        told = [f"{symbol} = {n}" for symbol, n in slot.symbols.items() if symbol in used]
        if told:
            notes.append(f"On {slot.title}, {', '.join(told)}.")
    return notes


def seed_note(blocks: Sequence[Block]) -> list[str]:
    """Return over how many seeds entries are means."""
    entries = (entry for block in blocks for row in block.rows for entry in row.entries)
    counts = sorted({len(e.seeds) for e in entries if isinstance(e, Entry) and e.seeds})
    if not counts:
        return []
    number = " or ".join(map(str, counts))
    noun = "seed" if counts == [1] else "seeds"
    note = f"Entries of a random method are means over {number} {noun}."
    if counts[0] == 1:
        note += " With one seed the standard error leaves out the spread between seeds."
    return [note]


def document_note(columns: Sequence[str], blocks: Sequence[Block]) -> list[str]:
    """Return the number of documents of each column."""
    parts = []
    for index, heading in enumerate(columns):
        entries = (row.entries[index] for block in blocks for row in block.rows)
        counts = sorted({e.documents for e in entries if isinstance(e, Entry) and e.documents})
        if counts:
            parts.append(f"{heading} {' or '.join(f'{count:,}' for count in counts)}")
    return [f"Documents: {', '.join(parts)}."] if parts else []


def test_note(blocks: Sequence[Block]) -> list[str]:
    """Return what the marks of paired tests mean, and how many entries have none."""
    cells = [c for b in blocks for row in b.rows for c in row.entries if isinstance(c, Entry)]
    count = sum(cell.test is not None for cell in cells)
    untested = sum(bool(cell.untested) for cell in cells)
    notes = []
    if count:
        notes.append(
            f"▼ worse, ▲ better than the same model's baseline: p < {ALPHA} in a paired test over "
            "the documents (McNemar's exact test; random sign flips for averages over seeds or "
            f"tasks), Holm-corrected for the {count} tests of this table."
        )
    if untested:
        noun = "entry has" if untested == 1 else "entries have"
        notes.append(f"{untested} {noun} no paired test: no baseline on the same documents.")
    return notes


def published_note(blocks: Sequence[Block]) -> list[str]:
    """Return what the published numbers beside ours are."""
    cells = (cell for block in blocks for row in block.rows for cell in row.entries)
    if not any(isinstance(cell, Entry) and cell.published for cell in cells):
        return []
    return [
        "published: what the paper prints, and in parentheses our difference to it and its z: over "
        "our standard error and the sampling error of the printed value on as many documents, as "
        "if they were other documents; on the same ones z is too small."
    ]
