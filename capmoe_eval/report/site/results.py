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
from capmoe_eval.report.tables.render import body_view
from capmoe_eval.report.tables.table import Row, Table


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
        order={NO_LIMIT: 1e9, NO_GAMMA: -1},
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
    classes = ["" if words else "number" for words in table.columns_of_words]
    return {
        "key": table.name,
        "title": table.title,
        "problem": "",
        "of": table,
        "headings": [
            *((text, "") for text in table.label_headings),
            *zip(table.columns, classes, strict=True),
        ],
        "blocks": body_view(table, lambda record: address.to(page.cell_path(record))),
        "links": [
            address.link_to_file(path, name)
            for suffix, name in (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX"))
            if (path := folder / f"{table.name}.{suffix}").is_file()
        ],
    }
