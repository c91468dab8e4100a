"""The page of all tables, and that of the numbers that are means of several records."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup

from capmoe_eval.paper.layout import TABLES, AnyLayout
from capmoe_eval.report.site import page
from capmoe_eval.report.site.blocks import (
    Block,
    DataCell,
    DataRow,
    DataTable,
    Filters,
    Folded,
    Notes,
    Notice,
    Prose,
    Section,
    element,
    head,
    joined,
    link,
    number,
)
from capmoe_eval.report.site.inventory import Inventory, attempt
from capmoe_eval.report.site.page import Address, gamma_filter, method_filter, name_filter
from capmoe_eval.report.tables.filled import measured_table
from capmoe_eval.report.tables.table import CellInWords, Entry, EntryPart, Table, TableCell
from capmoe_eval.report.templates import ABSENT

_ABOUT: Final = (
    "A number leads to its record; a mean of several leads to the list of them, a speedup to its "
    "file of timings. ± is one standard error, two numbers in brackets are quartiles; bold is the "
    "highest of a block of the paper's table. A heading sorts its table: ascending, descending, as "
    "it was."
)
_MEANS_ABOUT: Final = (
    "The numbers of the tables that are means, each with its records: over the seeds of a task, "
    "then over tasks."
)
_FORMATS: Final = {"csv": "CSV", "md": "Markdown", "tex": "LaTeX"}


def tables_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all tables."""
    sections = [table_section(layout, inventory, address) for layout in TABLES]
    rows = [row for table in _filled(inventory) for row in table.rows if row.model]
    choices = [
        name_filter("model", "Model", (row.model for row in rows)),
        method_filter(row.method for row in rows),
        gamma_filter(row.gamma for row in rows),
    ]
    contents = Notes([link(f"#{section.id}", section.title) for section in sections])
    blocks = [Prose(_ABOUT), *page.strong(inventory.notes), Folded("Contents", [contents])]
    blocks += [Filters(choices, keeps_baselines=True), *sections]
    return page.render_page(address, "Tables", inventory.profile, blocks)


def means_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all means of the tables, each with its records."""
    blocks: list[Block] = [Prose(_MEANS_ABOUT)]
    for table in _filled(inventory):
        if rows := [*_means(table, address)]:
            headings = (*table.label_headings, "Column", "Mean", "Of")
            means = DataTable(table.caption, headings, [rows], is_sortable=False)
            blocks.append(Section(table.title, [means]))
    return page.render_page(address, "Means", inventory.profile, blocks)


def _table(layout: AnyLayout, inventory: Inventory) -> Table | str:
    """Return a filled table, or why it cannot be filled."""
    words = inventory.overrides, inventory.reader, inventory.bench.folder
    table = attempt(lambda: measured_table(layout.key, *words))
    return table if isinstance(table, str) else table[0]


def _filled(inventory: Inventory) -> list[Table]:
    tables = (_table(layout, inventory) for layout in TABLES)
    return [table for table in tables if isinstance(table, Table)]


def table_section(layout: AnyLayout, inventory: Inventory, address: Address) -> Section:
    """Return a table, or why there is none."""
    table = _table(layout, inventory)
    if isinstance(table, str):
        title = layout.title.format_map(defaultdict(lambda: "…"))  # of no model that is known
        return Section(title, [Notice(f"This table cannot be filled: {table}")], layout.key)
    parts, line = [], itertools.count()
    for block in table.blocks:
        rows = []
        for row, _, texts in block.in_words(table.decimals):
            labels = [head(label, page.GAMMA_ORDER.get(label)) for label in row.labels]
            places = _places(table, next(line))
            cells = [_cell(*cell, address) for cell in zip(row.entries, texts, places, strict=True)]
            data = {"model": row.model, "method": row.method, "gamma": row.gamma}
            rows.append(DataRow([*labels, *cells], data if row.model else {}))
        parts.append(rows)
    blocks: list[Block] = [DataTable(table.caption, (*table.label_headings, *table.columns), parts)]
    blocks += address.files("Also as", address.out / inventory.profile / table.name, _FORMATS)
    blocks += page.missing("entry", "entries", table.missing_commands, len(table.missing))
    if table.notes:
        blocks.append(Notes(table.notes, "notes"))
    return Section(table.title, blocks, table.name)


def _places(table: Table, row: int) -> list[str]:
    """Return the names of a row's numbers on the page of means."""
    return [f"{table.name}-{row + 1}-{column + 1}" for column in range(len(table.columns))]


def _cell(cell: TableCell, words: CellInWords, place: str, address: Address) -> DataCell:
    if words.command is not None:
        return DataCell(ABSENT, "number missing", title=words.command)
    if not isinstance(cell, Entry):
        return DataCell(words.words)
    value: str = words.value
    if len(cell.parts) > 1:
        value = link(f"{address.to(page.MEANS)}#{place}", value)
    elif cell.parts:
        value = _part(cell.parts[0], value, address)
    parts = [element("strong", value) if words.best else value]
    if cell.test and (verdict := cell.test.verdict):
        text = f"{verdict} than the baseline"
        parts.append(element("span", words.mark, class_=verdict, role="img", aria_label=text))
    if words.quartiles:
        parts.append(element("small", f" {words.quartiles}"))
    if words.stderr:
        parts.append(element("small", f" ± {words.stderr}"))
    if words.published:
        text = element("small", f"published {words.published}", class_="published")
        parts.append(Markup("<br>") + text)
    return DataCell(joined(parts, ""), "number", float(cell.value), "; ".join(words.origin))


def _part(part: EntryPart, text: str, address: Address) -> Markup:
    """Return a number that leads to its record, or to its file of timings."""
    if isinstance(part.source, Path):
        return link(address.to_file(part.source), text)
    return link(address.to(page.cell_path(part.source)), text)


def _means(table: Table, address: Address) -> Iterator[DataRow]:
    for line, row in enumerate(table.rows):
        for cell, column, place in zip(
            row.entries, table.columns, _places(table, line), strict=True
        ):
            if isinstance(cell, Entry) and len(cell.parts) > 1:
                mean = number(f"{cell.value:.{table.decimals}f}", float(cell.value))
                of = DataCell(joined(_of(cell.parts, table.decimals, address), "; "))
                cells = [*map(head, row.labels), DataCell(column), mean, of]
                yield DataRow(cells, id=place)


def _of(parts: Sequence[EntryPart], decimals: int, address: Address) -> Iterator[Markup]:
    """Yield the numbers of each column with their seeds."""
    for column, same in itertools.groupby(parts, key=lambda part: part.column):
        numbers = []
        for part in same:
            value = _part(part, f"{part.value:.{decimals}f}", address)
            seed = None if isinstance(part.source, Path) else part.source.seed
            numbers.append(value if seed is None else joined([f"seed {seed}", value], " "))
        yield joined([column, joined(numbers)], " ")
