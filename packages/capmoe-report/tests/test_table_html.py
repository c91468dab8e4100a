"""A table as HTML: the golden element, any text, and links to records."""

from __future__ import annotations

import math
import re
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import pandas as pd
from capmoe_eval.report.tables.table import as_table
from hypothesis import given, settings
from tests.report.tables.test_render import LAYOUT, TOY, any_text, table_of

from capmoe_report.report import TABLE_PARTS
from capmoe_report.templates import render


def to_html(table: pd.DataFrame) -> str:
    return render("site/table.html", table=table, **TABLE_PARTS)


def test_table_is_the_golden_file() -> None:
    golden = Path(__file__).with_name("golden") / "toy.html"
    assert to_html(TOY) + "\n" == golden.read_text(encoding="utf-8")


@settings(max_examples=25, deadline=None)
@given(any_text, any_text, any_text)
def test_html_keeps_any_text(label: str, heading: str, note: str) -> None:
    root = ElementTree.fromstring(to_html(table_of(label, heading, note)))
    assert [th.text or "" for th in root.iter("th")] == [f"{heading}!", f"{heading}.", label, "x"]
    assert [td.get("title") or "" for td in root.iter("td")] == ["", note, ""]
    assert root.findtext("tfoot/tr/td") == note


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
