"""Tables of the paper, from measured results and from print.

A table rebuilds in seconds from JSON alone: nothing here imports torch, transformers or lm_eval.

    layouts    which rows and columns a table has (data)
    fill       puts measured numbers into a layout
    published  puts the printed numbers into the same layout
    table      what comes out: typed, independent of source and format
    render     Markdown, LaTeX, CSV, HTML
"""

from capmoe_eval.report.fill import Measured, Measurement, Source, fill
from capmoe_eval.report.layouts import LAYOUTS, Layout, ModelSlot, RowSpec, TaskColumn, get_layout
from capmoe_eval.report.published import PublishedNumber, lookup, published_numbers, published_table
from capmoe_eval.report.render import to_csv, to_html, to_latex, to_markdown, write
from capmoe_eval.report.table import Block, Entry, Missing, Row, Table

__all__ = [
    "LAYOUTS",
    "Block",
    "Entry",
    "Layout",
    "Measured",
    "Measurement",
    "Missing",
    "ModelSlot",
    "PublishedNumber",
    "Row",
    "RowSpec",
    "Source",
    "Table",
    "TaskColumn",
    "fill",
    "get_layout",
    "lookup",
    "published_numbers",
    "published_table",
    "to_csv",
    "to_html",
    "to_latex",
    "to_markdown",
    "write",
]
