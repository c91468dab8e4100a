"""Tables as the paper prints them, and from runs that measure what it prints."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import (
    LAYOUTS,
    PAPER_TABLES,
    Layout,
    ModelSlot,
    RowSpec,
    SettingsLayout,
    find_layout,
)
from capmoe_eval.paper.printed import find_row, printed_rows
from capmoe_eval.report.tables.fill import table
from capmoe_eval.report.tables.filled import published_table
from capmoe_eval.report.tables.formats import to_markdown
from capmoe_eval.report.tables.others import settings_table
from capmoe_eval.results.frames import results_of
from tests.records import result
from tests.report.tables import cell, measured

GOLDEN = Path(__file__).parent / "golden"
OF_PAPER = tuple(layout for layout in LAYOUTS if layout.version != "ours")


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


@pytest.mark.parametrize("layout", OF_PAPER, ids=lambda layout: layout.key)
def test_every_number_of_a_printed_table_is_in_it_once(layout: Layout) -> None:
    filled = published_table(layout.name, layout.version)
    printed = [
        value
        for row in printed_rows()
        if (row.table, row.version) == (layout.number, layout.version)
        for value in row.values.values()
    ]
    assert sorted(filled["value"]) == sorted(printed)
    states_gamma = not any("states no γ" in note for note in filled.attrs["notes"])
    assert states_gamma == layout.states_gamma


def runs_of(layout: Layout, slot: ModelSlot, spec: RowSpec) -> Iterator[Record]:
    """Runs that measure what the paper prints in a row; several columns may be of one task."""
    numbers = {name: x / layout.scale for name, x in layout.printed(slot, spec).tasks.items()}
    of_tasks: dict[str, dict[str, float]] = {}
    for column in layout.tasks:
        value = numbers[column.printed or column.heading]
        of_tasks.setdefault(column.task, {})[column.metric] = value
    for task, metrics in of_tasks.items():
        yield result(
            spec.method,
            spec.gamma_on(slot),
            task,
            metrics.pop("", 0.5),
            None,
            model=slot.key,
            n=10,
            metrics=metrics,
            metric="bertscore_f1",  # asked of MTS-Dialog alone
            seed=0 if spec.method == "random" else None,
            knobs={"ep_size": 8, **spec.knobs_on(slot)},
        )


@pytest.mark.parametrize("layout", OF_PAPER, ids=lambda layout: layout.key)
def test_runs_that_measure_the_papers_numbers_give_the_papers_table(layout: Layout) -> None:
    slots = [
        dataclasses.replace(slot, symbols={"2k": 16, "3k": 24}) for slot in layout.paper_models
    ]
    printed = tuple(tuple(spec for spec in block if spec.in_print) for block in layout.blocks)
    layout = dataclasses.replace(layout, blocks=printed)
    pairs = itertools.product(slots, itertools.chain(*printed))
    results = [run for slot, spec in pairs for run in runs_of(layout, slot, spec)]
    filled = table(results_of(results, layout.metrics), layout, slots)
    rows = [row for row in rendered_rows(filled) if "_published_" not in row]
    golden = golden_rows(layout.name, layout.version)
    assert [row[:-1] for row in rows[1:]] == [row[:-1] for row in golden[1:]]
    # The paper truncates some averages and rounds others.
    last = 0.11 if layout.decimals == 1 else 0.006
    for row, theirs in zip(rows[1:], golden[1:], strict=True):
        assert float(row[-1]) == pytest.approx(float(theirs[-1]), abs=last), theirs
    # The same numbers stand beside them, each with no difference.
    tasks = filled[filled["column"] != layout.average]
    assert tasks["difference"].abs().max() < 1e-9
    assert tasks["published"].notna().all()


TABLE7 = next(layout for layout in OF_PAPER if layout.key == "table7")
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


def test_every_step_under_a_capacity_is_measured_and_not_in_print() -> None:
    """What is missing is asked for with what it needs, and only where it needs it."""
    results = [
        result(
            "score", 1.0, "nq_open", value, model=OLMOE.key, knobs={"ep_size": 8, "decode": decode}
        )
        for decode, value in (("unconstrained", 0.4), ("constrained", 0.3))
    ]
    filled = table(results_of(results), TABLE7, [OLMOE])
    alone, every = cell(filled, 1, 1), cell(filled, 3, 1)
    assert every["Method"] == "Token Drop, every step"
    assert (alone.value, every.value) == (0.4, 0.3)
    assert (math.isnan(alone.published), math.isnan(every.published)) == (False, True)
    command = cell(filled, 1, 0).command
    assert "allow_code_execution=true" in command
    assert "nq_open" not in command
    without = result("score", 1.0, "humaneval", 0.4, model=OLMOE.key, knobs={"ep_size": 8})
    command = cell(table(results_of([without]), TABLE7, [OLMOE]), 1, 1).command
    assert "allow_code_execution" not in command


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ({"table": 1, "model": "OLMoE", "method": "Random", "gamma": 1.5}, 59.1),
        ({"table": 1, "model": "OLMoE", "method": "Baseline", "gamma": math.inf}, 64.0),
        ({"table": 2, "model": "OLMoE-Instruct", "method": "Expert Drop"}, 60.5),
        ({"table": 6, "model": "DeepSeek-V2-Lite", "method": "Token Drop", "gamma": None}, 0.53),
    ],
)
def test_a_printed_row_is_found_by_its_fields(key: dict[str, object], value: float) -> None:
    assert find_row(key).values["Avg."] == value


def test_what_is_not_printed_is_named() -> None:
    with pytest.raises(LookupError, match=r"prints no row .*'Score'.*3\.0"):
        find_row({"table": 1, "model": "OLMoE", "method": "Score", "gamma": 3.0})
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        published_table("tabel1")
    with pytest.raises(UsageError, match=r"version=v3: .*v1, v2"):
        published_table("table1", "v3")


def test_settings_that_differ_are_told() -> None:
    layout = find_layout("table5")
    assert isinstance(layout, SettingsLayout)
    keys = {printed: key for key, printed in layout.metrics.items()}
    same = {
        setting["task"]: {
            "fewshot": setting["shots"],
            "metric": keys[setting["metric"]],
            "filter": "none",
        }
        for setting in layout.settings
    }
    filled = settings_table(layout, same)
    row = filled[filled["Task"] == "HellaSwag"]["text"]
    assert row.tolist() == ["10", "Accuracy (Norm)", "–", "10", "Accuracy (Norm)"]
    assert measured(filled).empty
    assert len(filled.attrs["notes"]) == 1
    ours = same | {
        "boolq": {"fewshot": None, "metric": "acc", "filter": "none"},
        "gsm8k": {"fewshot": 5, "metric": "f1", "filter": "strict-match"},
    }
    assert settings_table(layout, ours).attrs["notes"] == [
        "BoolQ differs: ours lm-eval's, Accuracy; paper 0, Accuracy.",
        "GSM8K differs: ours 5, f1; paper 5, Exact Match.",
    ]
