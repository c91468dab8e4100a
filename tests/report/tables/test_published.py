"""Tables as the paper prints them, and from runs that measure what it prints."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.paper.layout import (
    LAYOUTS,
    PAPER_TABLES,
)
from capmoe_eval.paper.printed import find_row
from capmoe_eval.report.tables.fill import table
from capmoe_eval.report.tables.filled import published_table
from capmoe_eval.report.tables.formats import to_markdown
from capmoe_eval.results.frames import results_of
from tests.records import result
from tests.report.tables import cell

GOLDEN = Path(__file__).parent / "golden"


def rendered_rows(filled: pd.DataFrame) -> list[list[str]]:
    """Read the cells of the rendered table, without its marks, back from Markdown."""
    lines = [line for line in to_markdown(filled).splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    cells = [[text.strip().replace("**", "") for text in row] for row in rows]
    return [cells[0], *cells[2:]]


def golden_rows(name: str, version: str) -> list[list[str]]:
    text = (GOLDEN / f"print_{name}_{version}.tsv").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()]


@pytest.mark.parametrize(("name", "version"), [(t.name, t.version) for t in PAPER_TABLES])
def test_table_comes_out_as_printed(name: str, version: str) -> None:
    filled = published_table(name, version)
    assert filled.attrs["name"] == f"{name}_published_{version}"
    assert rendered_rows(filled) == golden_rows(name, version)


TABLE7 = next(layout for layout in LAYOUTS if layout.key == "table7")
OLMOE = TABLE7.paper_models[0]


def test_another_metric_than_the_papers_has_no_printed_value_beside_it() -> None:
    results = [
        result("baseline", None, column.task, 0.5, metric="rougeL", model=OLMOE.key)
        for column in TABLE7.tasks
    ]
    row = table(results_of(results), TABLE7, [OLMOE]).head(3)
    assert row["published"].notna().tolist() == [True, True, False]
    task = TABLE7.tasks[2].task
    scored = result("baseline", None, task, 0.8, metric="bertscore_f1", model=OLMOE.key)
    mts = cell(table(results_of([*results[:2], scored]), TABLE7, [OLMOE]), 0, 2)
    assert mts.difference == pytest.approx(0.8 - 0.827)
    # A BERTScore is no share: the printed one is taken to vary as ours does.
    assert mts.z == pytest.approx((0.8 - 0.827) / math.hypot(0.02, 0.02))


def test_what_is_not_printed_is_named() -> None:
    with pytest.raises(LookupError, match=r"prints no row .*'Score'.*3\.0"):
        find_row({"table": 1, "model": "OLMoE", "method": "Score", "gamma": 3.0})
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        published_table("tabel1")
    with pytest.raises(UsageError, match=r"version=v3: .*v1, v2"):
        published_table("table1", "v3")
