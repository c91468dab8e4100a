"""The page of tables."""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.paper.layout import AnyLayout, Layout
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory, attempt
from capmoe_eval.report.site.names import gamma_filter, method_filter, name_filter
from capmoe_eval.report.site.page import Address, render_page
from capmoe_eval.report.tables.measured import other_table, results_table
from capmoe_eval.report.tables.render import cell_view, marked
from capmoe_eval.report.tables.table import Cell, Entry, Row, Table


def tables_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all tables."""
    tables: list[dict[str, object]] = []
    rows: list[Row] = []
    for layout in TABLES:
        table = _table(layout, inventory)
        if isinstance(table, str):
            tables.append({"key": layout.key, "title": layout.title, "problem": table})
        else:
            tables.append(_view(table, address.out / inventory.profile, address))
            rows += [row for row in table.rows if row.model]
    return render_page(
        "tables",
        address,
        "Tables",
        inventory.profile,
        notes=inventory.notes,
        choices=[
            name_filter("model", "Model", (row.model for row in rows)),
            method_filter(row.method for row in rows),
            gamma_filter(row.gamma for row in rows),
        ],
        tables=tables,
    )


def _table(layout: AnyLayout, inventory: Inventory) -> Table | str:
    """Return a filled table, or why it cannot be filled."""
    if not isinstance(layout, Layout):
        return attempt(lambda: other_table(layout, inventory.bench))
    found = inventory.experiments[layout.key]
    if isinstance(found, str):
        return found
    return attempt(lambda: results_table(layout, found, inventory.overrides))


def _view(table: Table, folder: Path, address: Address) -> dict[str, object]:
    """Return what the template shows of a table."""
    headings = [(text, "") for text in table.label_headings]
    headings += [
        (text, "" if words else "number")
        for text, words in zip(table.columns, table.columns_of_words, strict=True)
    ]
    blocks = [
        [
            {
                "of": row,
                "labels": [(text, {NO_LIMIT: 1e9, NO_GAMMA: -1}.get(text)) for text in row.labels],
                "entries": [_entry(*cell, table.decimals, address) for cell in line],
            }
            for row, line in zip(block.rows, marked(table, block), strict=True)
        ]
        for block in table.blocks
    ]
    count = len(table.missing)
    told = f"{count} {'entry is' if count == 1 else 'entries are'} missing"
    return {
        "key": table.name,
        "title": table.title,
        "problem": "",
        "caption": table.caption,
        "headings": headings,
        "blocks": blocks,
        "files": [
            address.link_to_file(path, name)
            for suffix, name in (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX"))
            if (path := folder / f"{table.name}.{suffix}").is_file()
        ],
        "missing": count and f"{told}: the commands that measure them",
        "commands": table.missing_commands,
        "notes": table.notes,
    }


def _entry(cell: Cell, best: bool, decimals: int, address: Address) -> dict[str, object]:
    found = cell_view(cell, best, decimals)
    if isinstance(cell, Entry) and cell.records:
        found["href"] = address.to(page.cell_path(cell.records[0]))
    return found
