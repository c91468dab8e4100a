from __future__ import annotations

import html

import pytest
from jinja2 import UndefinedError

from capmoe_eval.report.site.blocks import DataCell, DataRow, DataTable, Notes, Pairs, badge, link
from capmoe_eval.report.site.page import Address, render_page
from capmoe_eval.report.templates import render

HOSTILE = "<b>&\"'{{ 1 }}"
TEXT = html.escape(HOSTILE)


@pytest.mark.parametrize(
    ("block", "escaped"),
    [
        (Pairs([(HOSTILE, HOSTILE)]), f'<th scope="row">{TEXT}</th><td>{TEXT}</td>'),
        (Pairs([("a", badge(HOSTILE))]), f'<span class="badge -b-">{TEXT}</span>'),
        (Notes([link(HOSTILE, HOSTILE)]), f'<li><a href="{TEXT}">{TEXT}</a></li>'),
        (
            DataTable("c", [HOSTILE], [[DataRow([DataCell("x", title=HOSTILE)], {"m": HOSTILE})]]),
            f'<tr data-m="{TEXT}"><td title="{TEXT}">x</td></tr>',
        ),
    ],
)
def test_texts_are_escaped_as_the_standard_library_does(block: Pairs, escaped: str) -> None:
    assert escaped in render_page(Address("index.html"), "t", "zoo", [block])


def test_a_value_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="table"):
        render("table.html")
