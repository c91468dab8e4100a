"""The layout of each of the paper's tables, read from ``data/layouts.yaml``."""

from __future__ import annotations

from typing import Final

from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.paper.layout import AnyLayout, Layout

_READ: Final = read_data(__package__, "data/layouts.yaml", tuple[AnyLayout, ...])
_ORDER: Final = ("v2", "v1", "ours")
TABLES: Final = tuple(sorted(_READ, key=lambda one: (_ORDER.index(one.version), one.number)))
"""Every table, those of v2 first, and last the ones that the paper lacks."""

PAPER_TABLES: Final = tuple(table for table in TABLES if table.version != "ours")
"""Every table of the paper."""

LAYOUTS: Final = tuple(table for table in TABLES if isinstance(table, Layout))
"""Those of results."""

ALL_TASKS: Final = next(layout.tasks for layout in LAYOUTS if layout.key == "table2")
"""The columns of Table 2: the eight multiple-choice tasks, and GSM8K."""


def find_layout(key: str) -> AnyLayout:
    """Return a table's layout by its :attr:`PaperTable.key`, or raise UsageError."""
    tables = {table.key: table for table in TABLES}
    if key not in tables:
        raise bad_choice("table", key, tables)
    return tables[key]


def printed_layout(name: str, version: str) -> AnyLayout:
    """Return the layout of a table in a version of the paper, or raise UsageError."""
    versions = {layout.version: layout for layout in PAPER_TABLES if layout.name == name}
    if not versions:
        raise bad_choice("table", name, dict.fromkeys(layout.name for layout in PAPER_TABLES))
    if version not in versions:
        raise bad_choice("version", version, sorted(versions))
    return versions[version]
