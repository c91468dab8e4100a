"""Every kind of cell in every format, and any text."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.paper.layout import PaperTable, find_layout
from capmoe_eval.report.tables.table import RENDERERS, as_table, to_latex, to_markdown

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = PaperTable("toy", "ours", 0, "R&D <toy>", "Accuracy (%) of a_model at γ = +∞ | 100 %.")
MISSING: dict[str, Any] = {}
COMMAND = "capmoe-eval run method=random 'tasks=[b&q,c]'"
ROWS: list[tuple[int, str, str, list[dict[str, Any]]]] = [
    (0, "Baseline", "+∞", [{"value": 45.6, "stderr": 2.2}, {"value": 80.125}, {"text": "a < b"}]),
    (
        1,
        "Order <first>",
        "1.5",
        [
            {"value": 42.04, "stderr": 2.0, "effect": -3.6, "p": 1e-4, "n": 1838},
            {"value": 80.1, "low": 79.0, "high": 81.25, "effect": 5.0, "p": 1e-3},
            {"text": "–"},
        ],
    ),
    (
        1,
        "Random",
        "1.5",
        [
            {"value": 41.0, "stderr": 3.0, "seeds": "0, 1", "published": 43.0, "sampling": 4.0},
            {"value": 79.9, "truncated": 3, "tokens": 9, "published": 79.9},
            MISSING,
        ],
    ),
    (1, "Score", "1.5", [{"value": 41.96, "effect": -0.1, "p": 0.03}, MISSING, MISSING]),
]


def laid_out(rows: list[tuple[int, str, str, list[dict[str, Any]]]]) -> Iterator[Mapping[str, Any]]:
    for line, (block, method, gamma, cells) in enumerate(rows):
        of_row = {"line": line, "block": block, "Method": method, "γ": gamma}
        of_row |= {"model": "m", "method": "order", "gamma": 1.5, "records": ("a", "b")}
        yield from (
            of_row | {"column": column} | cell
            for column, cell in zip(("a_1", "B&Q", "Words"), cells, strict=True)
        )


NOTES = ["Untrained: 50 % is chance."]
TOY = as_table(LAYOUT, ["Method", "γ"], laid_out(ROWS), NOTES, commands=[COMMAND])
any_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)


def table_of(label: str, heading: str, note: str) -> pd.DataFrame:
    layout = PaperTable("t", "ours", 0, "{title}", note)
    cells: Iterator[Mapping[str, Any]] = (
        {"line": line, "block": 0, f"{heading}!": name, "column": f"{heading}.", **cell}
        for line, (name, cell) in enumerate(((label, {"value": 1.25}), ("x", {})))
    )
    return as_table(layout, [f"{heading}!"], cells, [note], commands=[note], title=label)


@pytest.mark.parametrize("suffix", RENDERERS)
def test_table_is_the_golden_file(suffix: str) -> None:
    assert RENDERERS[suffix](TOY) == (GOLDEN / f"toy.{suffix}").read_text(encoding="utf-8")


@pytest.mark.parametrize(("layout", "sign"), [("table1", 1), ("passages", -1)])
def test_best_values_and_marks_follow_the_direction_of_a_metric(layout: str, sign: int) -> None:
    """Of equal prints all are best. Holm: the smallest of three p counts three times, the next
    twice; 0.06 is no mark."""
    for values, best in (
        ((45.6, 47.8, 47.2), {1}),
        ((47.84, 47.76, 45.6), {0, 1}),  # both print 47.8
        ((None, -3.0, -1.0), {2}),
        ((45.6, None), set()),  # nothing was compared
    ):
        rows = [
            {"line": line, "block": 0, "column": "a", "value": value and sign * value}
            for line, value in enumerate(values)
        ]
        table = as_table(find_layout(layout), [], rows, model="m")
        assert {*table["line"][table["best"]]} == best
    tests = [(1.0, 0.01), (-1.0, 0.02), (1.0, 0.06), (None, None)]
    rows = [
        {"line": line, "block": 0, "column": "a", "value": 1.0, "effect": effect, "p": p}
        for line, (effect, p) in enumerate(tests)
    ]
    table = as_table(find_layout(layout), [], rows, model="m")
    assert table["corrected"].tolist()[:3] == pytest.approx([0.03, 0.04, 0.06])
    assert table["mark"].tolist() == [*"▲▼"[::sign], "", ""]


@settings(max_examples=25, deadline=None)
@given(any_text, any_text, any_text)
def test_markdown_keeps_the_table_whole(label: str, heading: str, note: str) -> None:
    table = to_markdown(table_of(label, heading, note)).split("\n\n")[2]
    bars = [len(re.findall(r"\|", re.sub(r"\\.", "", line))) for line in table.split("\n")]
    assert bars == [3, 3, 3, 3]


@settings(max_examples=25, deadline=None)
@given(any_text, any_text)
def test_latex_keeps_the_table_whole(label: str, heading: str) -> None:
    latex = to_latex(table_of(label, heading, "note"))
    body = latex.split("\\toprule\n")[1].split("\n\\bottomrule")[0]
    lines = [line for line in body.split("\n") if line != "\\midrule"]
    assert [line.endswith(r" \\") for line in lines] == [True, True, True]
    bare = [re.sub(r"\\[&%$#_{}]", "", line.removesuffix(r" \\")) for line in lines]
    assert [line.count("&") for line in bare] == [1, 1, 1]
    assert not any(re.search(r"[%#_~^]|^\s*[\[*]", line) for line in bare)
    assert all(line.count("{") == line.count("}") for line in bare)
    assert all(line.count("$") % 2 == 0 for line in bare)
