import dataclasses
import itertools
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import (
    LAYOUTS,
    PAPER_TABLES,
    Layout,
    ModelSlot,
    PaperTable,
    RowSpec,
    SettingsLayout,
    find_layout,
)
from capmoe_eval.paper.printed import find_row, printed_rows
from capmoe_eval.report.tables.entries import RecordEntries
from capmoe_eval.report.tables.filled import fill, published_table
from capmoe_eval.report.tables.formats import to_markdown
from capmoe_eval.report.tables.others import settings_table
from capmoe_eval.report.tables.table import CellText, Entry, Missing, Table
from tests.records import result

GOLDEN = Path(__file__).parent / "golden"
TABLE5 = find_layout("table5")
assert isinstance(TABLE5, SettingsLayout)


def rendered_rows(table: Table) -> list[list[str]]:
    """Read the cells of the rendered table, without its marks, back from Markdown."""
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    cells = [[cell.strip().replace("**", "") for cell in row] for row in rows]
    return [cells[0], *cells[2:]]


def golden_rows(name: str, version: str) -> list[list[str]]:
    text = (GOLDEN / f"print_{name}_{version}.tsv").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()]


@pytest.mark.parametrize(("name", "version"), [(t.name, t.version) for t in PAPER_TABLES])
def test_table_comes_out_as_printed(name: str, version: str) -> None:
    assert rendered_rows(published_table(name, version)) == golden_rows(name, version)


OF_PAPER = tuple(layout for layout in LAYOUTS if layout.version != "ours")


@pytest.mark.parametrize("layout", OF_PAPER, ids=lambda layout: layout.key)
def test_every_number_of_a_printed_table_is_in_it_once(layout: PaperTable) -> None:
    table = published_table(layout.name, layout.version)
    shown = [e.value for row in table.rows for e in row.entries if isinstance(e, Entry)]
    printed = [
        value
        for row in printed_rows()
        if (row.table, row.version) == (layout.number, layout.version)
        for value in row.values.values()
    ]
    assert sorted(shown) == sorted(printed)


def measured(layout: Layout, slot: ModelSlot, spec: RowSpec) -> Iterator[Record]:
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
    runs = itertools.product(slots, itertools.chain(*printed))
    results = [result for slot, spec in runs for result in measured(layout, slot, spec)]
    table = fill(layout, slots, RecordEntries(results).row)
    rows = [row for row in rendered_rows(table) if "_published_" not in row]
    golden = golden_rows(layout.name, layout.version)
    assert [row[:-1] for row in rows[1:]] == [row[:-1] for row in golden[1:]]
    # The paper truncates some averages and rounds others.
    last = 0.11 if layout.decimals == 1 else 0.006
    for row, theirs in zip(rows[1:], golden[1:], strict=True):
        assert float(row[-1]) == pytest.approx(float(theirs[-1]), abs=last), theirs
    # The same numbers stand below, each with no difference.
    for row in table.rows:
        for entry in row.entries[: None if layout.average is None else -1]:
            assert isinstance(entry, Entry)
            assert entry.published is not None
            assert entry.published.difference == pytest.approx(0.0, abs=1e-9)


def test_another_metric_than_the_papers_has_no_printed_value_beside_it() -> None:
    layout = next(layout for layout in OF_PAPER if layout.key == "table7")
    model = layout.paper_models[0]
    results = [
        result("baseline", None, column.task, 0.5, metric="rougeL", model=model.key)
        for column in layout.tasks
    ]
    he, nq, mts = fill(layout, [model], RecordEntries(results).row).rows[0].entries
    assert isinstance(he, Entry)
    assert isinstance(nq, Entry)
    assert isinstance(mts, Entry)
    assert he.published is not None
    assert nq.published is not None
    assert mts.published is None
    task = layout.tasks[2].task
    scored = result("baseline", None, task, 0.8, metric="bertscore_f1", model=model.key)
    mts = fill(layout, [model], RecordEntries([*results[:2], scored]).row).rows[0].entries[2]
    assert isinstance(mts, Entry)
    assert mts.published is not None
    assert mts.published.difference == pytest.approx(0.8 - 0.827)
    # A BERTScore is no share: the printed one is taken to vary as ours does.
    assert mts.published.z == pytest.approx((0.8 - 0.827) / math.hypot(0.02, 0.02))


def test_every_step_under_a_capacity_is_measured_and_not_in_print() -> None:
    layout = next(layout for layout in OF_PAPER if layout.key == "table7")
    model = layout.paper_models[0]
    results = [
        result(
            "score", 1.0, "nq_open", value, model=model.key, knobs={"ep_size": 8, "decode": decode}
        )
        for decode, value in (("unconstrained", 0.4), ("constrained", 0.3))
    ]
    rows = fill(layout, [model], RecordEntries(results).row).rows
    alone, every = rows[1].entries[1], rows[3].entries[1]
    assert rows[3].labels[1] == "Token Drop, every step"
    assert isinstance(alone, Entry)
    assert isinstance(every, Entry)
    assert (alone.value, every.value) == (0.4, 0.3)
    assert alone.published is not None
    assert every.published is None
    # What is missing is asked for with what it needs, and only where it needs it.
    lacking = rows[1].entries[0]
    assert isinstance(lacking, Missing)
    assert "allow_code_execution=true" in lacking.command
    assert "nq_open" not in lacking.command
    without = [result("score", 1.0, "humaneval", 0.4, model=model.key, knobs={"ep_size": 8})]
    lacking = fill(layout, [model], RecordEntries(without).row).rows[1].entries[1]
    assert isinstance(lacking, Missing)
    assert "allow_code_execution" not in lacking.command


def test_published_tables_say_so_and_keep_their_own_files() -> None:
    tables = [published_table("table2", version) for version in ("v1", "v2")]
    assert [t.name for t in tables] == ["table2_published_v1", "table2_published_v2"]
    assert tables[0].notes[0] == "Published numbers (v1, arXiv), averages as printed."
    assert "Qwen1.5-MoE-Chat 1.5" in tables[0].notes[1]
    assert published_table("table1").rows[-1].entries[-1].value == 61.1  # the mean is 61.175


def test_renamed_method_kept_its_numbers() -> None:
    reroute, expanded = published_table("table2", "v1"), published_table("table2", "v2")
    assert [row.entries for row in reroute.rows] == [row.entries for row in expanded.rows]
    assert {row.labels[1] for row in reroute.rows} ^ {row.labels[1] for row in expanded.rows} == {
        "Token Reroute",
        "Expanded Drop",
    }


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


def test_a_row_that_is_not_printed_is_named() -> None:
    with pytest.raises(LookupError, match=r"prints no row .*'Score'.*3\.0"):
        find_row({"table": 1, "model": "OLMoE", "method": "Score", "gamma": 3.0})


def test_every_cell_is_printed_once() -> None:
    lines = (resources.files("capmoe_eval.paper") / "data" / "tables.csv").read_text().splitlines()
    assert sum(len(row.values) for row in printed_rows()) == len(lines) - 1 == 794


def test_unknown_tables_are_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        published_table("tabel1")
    with pytest.raises(UsageError, match=r"version=v3: .*v1, v2"):
        published_table("table1", "v3")


def test_no_gamma_is_said_where_the_paper_says_none() -> None:
    notes = published_table("table6").notes
    assert not any(note.startswith("γ:") for note in notes)
    assert any("states no γ" in note for note in notes)


def setting(fewshot: int | None, metric: str, answers: str = "none") -> dict[str, object]:
    return {"fewshot": fewshot, "metric": metric, "filter": answers}


KEYS = {printed: key for key, printed in TABLE5.metrics.items()}
SETTINGS = {one.task: setting(one.shots, KEYS[one.metric]) for one in TABLE5.settings}


def test_settings_stand_beside_the_printed_ones() -> None:
    table = settings_table(TABLE5, SETTINGS)
    row = next(row for row in table.rows if row.labels == ("HellaSwag",))
    assert row.entries == tuple(
        map(CellText, ("10", "Accuracy (Norm)", "–", "10", "Accuracy (Norm)"))
    )
    assert table.notes == ("All settings are the paper's. It names no filter of the answers.",)


def test_settings_that_differ_are_told() -> None:
    ours = SETTINGS | {
        "boolq": setting(None, "acc"),
        "gsm8k": setting(5, "f1", "strict-match"),
    }
    table = settings_table(TABLE5, ours)
    assert table.notes == (
        "BoolQ differs: ours lm-eval's, Accuracy; paper 0, Accuracy.",
        "GSM8K differs: ours 5, f1; paper 5, Exact Match.",
    )
    row = next(row for row in table.rows if row.labels == ("GSM8K",))
    assert row.entries[2] == CellText("strict-match")
