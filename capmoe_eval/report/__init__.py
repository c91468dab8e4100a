"""Tables of the paper, from measured results and from print.

A table rebuilds in seconds from JSON alone: nothing here imports torch, transformers or lm_eval.

    layout        what a layout of a table is
    layouts       which rows and columns the tables have (data)
    fill          puts measured numbers into a layout
    source        what is needed to know of where its numbers come from
    notes         the sentences below a table
    published     puts the printed numbers into the same layout
    settings      the table of evaluation settings
    workload      the table of speedups by workload
    table         what comes out: typed, independent of source and format
    render        Markdown, LaTeX, CSV, HTML
"""

from capmoe_eval.report.fill import Measured, fill
from capmoe_eval.report.layout import (
    Layout,
    ModelSlot,
    RowSpec,
    SettingsLayout,
    TaskColumn,
    WorkloadLayout,
)
from capmoe_eval.report.layouts import LAYOUTS, TABLES, find_layout, get_layout
from capmoe_eval.report.published import (
    Printed,
    printed_speedups,
    published_table,
)
from capmoe_eval.report.render import to_csv, to_html, to_latex, to_markdown, write
from capmoe_eval.report.settings import TaskSettings, settings_table
from capmoe_eval.report.source import Measurement, Source
from capmoe_eval.report.table import (
    Block,
    Entry,
    Missing,
    PairedTest,
    Published,
    Row,
    Table,
    Text,
)
from capmoe_eval.report.workload import workload_table

__all__ = [
    "LAYOUTS",
    "TABLES",
    "Block",
    "Entry",
    "Layout",
    "Measured",
    "Measurement",
    "Missing",
    "ModelSlot",
    "PairedTest",
    "Printed",
    "Published",
    "Row",
    "RowSpec",
    "SettingsLayout",
    "Source",
    "Table",
    "TaskColumn",
    "TaskSettings",
    "Text",
    "WorkloadLayout",
    "fill",
    "find_layout",
    "get_layout",
    "printed_speedups",
    "published_table",
    "settings_table",
    "to_csv",
    "to_html",
    "to_latex",
    "to_markdown",
    "workload_table",
    "write",
]
