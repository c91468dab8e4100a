"""Align the columns of a table in text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], numbers: Collection[str] | None = None) -> list[str]:
    """Return rows of cells, the first of which are headings, as lines.

    ``numbers`` are the headings of columns whose ends are in line: all but the first for None.
    """
    columns = []
    for place, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        of_numbers = place > 0 if numbers is None else cells[0] in numbers
        columns.append([c.rjust(width) if of_numbers else c.ljust(width) for c in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
