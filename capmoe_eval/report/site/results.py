"""The page of tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final, TypeAlias

from capmoe_eval.paper.layout import AnyLayout
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory, attempt
from capmoe_eval.report.site.names import GAMMA_ORDER, gamma_filter, method_filter, name_filter
from capmoe_eval.report.site.page import Address, render_page
from capmoe_eval.report.tables.measured import measured_table
from capmoe_eval.report.tables.render import body_view
from capmoe_eval.report.tables.table import Table

View: TypeAlias = dict[str, object]
"""What the template shows of a table."""

_FORMATS: Final = {"csv": "CSV", "md": "Markdown", "tex": "LaTeX"}


def tables_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all tables."""
    tables = [(layout, _table(layout, inventory)) for layout in TABLES]
    filled = [table for _, table in tables if isinstance(table, Table)]
    rows = [row for table in filled for row in table.rows if row.model]
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
        tables=[_view(layout, table, inventory, address) for layout, table in tables],
        order=GAMMA_ORDER,
    )


def table_views(keys: Collection[str], inventory: Inventory, address: Address) -> list[View]:
    """Return what the template shows of some tables, in the order of all."""
    return [
        _view(layout, _table(layout, inventory), inventory, address)
        for layout in TABLES
        if layout.key in keys
    ]


def _table(layout: AnyLayout, inventory: Inventory) -> Table | str:
    """Return a filled table, or why it cannot be filled."""
    found = attempt(
        lambda: measured_table(
            layout.key, inventory.overrides, inventory.reader, inventory.bench.folder
        )
    )
    return found if isinstance(found, str) else found[0]


def _view(layout: AnyLayout, table: Table | str, inventory: Inventory, address: Address) -> View:
    """Return what the template shows of a table, or of why there is none."""
    if isinstance(table, str):
        title = layout.title.format_map(defaultdict(lambda: "…"))  # of no model that is known
        return {"key": layout.key, "title": title, "problem": table}
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
        "links": address.files(address.out / inventory.profile / table.name, _FORMATS),
    }
