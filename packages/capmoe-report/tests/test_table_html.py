"""A table as HTML: the golden element, and links to records."""

from __future__ import annotations

import math
import re
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl

import pandas as pd
from capmoe_eval.report.tables.table import as_table
from tests.report.tables.test_render import LAYOUT, TOY

from capmoe_report.report import TABLE_PARTS
from capmoe_report.templates import render


def to_html(table: pd.DataFrame) -> str:
    return render("site/table.html", table=table, **TABLE_PARTS)


def test_table_is_the_golden_file() -> None:
    golden = Path(__file__).with_name("golden") / "toy.html"
    assert to_html(TOY) + "\n" == golden.read_text(encoding="utf-8")


def test_a_row_leads_to_its_records() -> None:
    """By what a page of records chooses: also by γ of the baseline, whose sign is a space bare."""
    row = {"block": 0, "Method": "M", "model": "a&b", "column": "x", "value": 1.0}
    rows = [
        row | {"line": 0, "method": "baseline", "gamma": math.inf},
        row | {"line": 1, "method": "score", "gamma": 1.0},
    ]
    text = to_html(as_table(LAYOUT, ["Method"], rows))
    links = [unescape(href) for href in re.findall('<a href="records.html#(.*?)">M</a>', text)]
    assert [dict(parse_qsl(link)) for link in links] == [
        {"model": "a&b", "method": "baseline", "gamma": "+∞"},
        {"model": "a&b", "method": "score", "gamma": "1"},
    ]
