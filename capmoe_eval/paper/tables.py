"""The layout of each of the paper's tables, read from ``data/layouts.yaml``."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

import yaml

from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.names import TITLES
from capmoe_eval.paper.layout import (
    AnyLayout,
    Layout,
    ModelSlot,
    RowSpec,
    Setting,
    SettingsLayout,
    TaskColumn,
    WorkloadLayout,
)


def _layout(entry: dict[str, Any]) -> AnyLayout:
    """Return the layout that an entry of the file describes."""
    if "settings" in entry:
        return SettingsLayout(
            **entry | {"settings": tuple(Setting(**one) for one in entry["settings"])}
        )
    if "workloads" in entry:
        return WorkloadLayout(**entry)
    parts = {
        "labels": tuple(entry["labels"].items()),
        "tasks": tuple(TaskColumn(**column) for column in entry["tasks"]),
        "blocks": tuple(tuple(_row(**row) for row in block) for block in entry["blocks"]),
        "paper_models": tuple(ModelSlot(**model) for model in entry["paper_models"]),
        "notes": tuple(entry.get("notes", ())),
    }
    return Layout(**entry | parts)


def _row(method: str, name: str = "", **fields: Any) -> RowSpec:
    return RowSpec(name or TITLES[method], method, **fields)


def _read() -> tuple[AnyLayout, ...]:
    text = (resources.files(__package__) / "data" / "layouts.yaml").read_text(encoding="utf-8")
    entries = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    layouts = [_layout(entry) for entry in entries]
    return tuple(sorted(layouts, key=lambda layout: (layout.version != "v2", layout.number)))


TABLES: Final = _read()
"""Every table, those of v2 first."""

LAYOUTS: Final = tuple(table for table in TABLES if isinstance(table, Layout))
"""Those of results."""

ALL_TASKS: Final = next(layout.tasks for layout in LAYOUTS if layout.key == "table2")
"""The columns of Table 2: the eight multiple-choice tasks, and GSM8K."""


def find_layout(key: str) -> AnyLayout:
    """Return a table's layout by its :attr:`PaperTable.key`.

    Raises:
        UsageError: If there is none of that key.
    """
    layouts = {layout.key: layout for layout in TABLES}
    if key not in layouts:
        raise bad_choice("table", key, layouts)
    return layouts[key]


def printed_layout(name: str, version: str) -> AnyLayout:
    """Return the layout of a table in a version of the paper.

    Raises:
        UsageError: If there is none of that name or version.
    """
    versions = {layout.version: layout for layout in TABLES if layout.name == name}
    if not versions:
        raise bad_choice("table", name, dict.fromkeys(layout.name for layout in TABLES))
    if version not in versions:
        raise bad_choice("version", version, sorted(versions))
    return versions[version]
