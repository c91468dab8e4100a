"""A layout and results give the numbers, errors, tests and printed numbers of a table."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import LAYOUTS, PAPER_TABLES, Layout, ModelSlot, RowSpec, TaskColumn
from capmoe_eval.paper.printed import find_row
from capmoe_eval.report.tables.fill import table
from capmoe_eval.report.tables.filled import published_table
from capmoe_eval.report.tables.table import to_markdown
from capmoe_eval.results.frames import results_of
from tests.records import result
from tests.report.tables import cell, measured

TINY = ModelSlot("tiny_olmoe", "tiny OLMoE (untrained)", 1.25, knobs={"ep_size": 8})
LAYOUT = Layout(
    name="toy",
    version="v2",
    number=1,
    title="Toy on {model}",
    caption="Accuracy (%).",
    labels=(("Method", "{name}"), ("γ", "{gamma}")),
    tasks=(TaskColumn("obqa", "OBQA"), TaskColumn("piqa", "PIQA")),
    blocks=(
        (RowSpec("Baseline", "baseline"), RowSpec("Expert Drop", "expert_drop")),
        (RowSpec("Score", "score", 1.0), RowSpec("Random", "random", 1.0)),
    ),
    paper_models=(),
)
BASELINE, _, SCORE, RANDOM = range(4)
AVERAGE = 2


def toy(*results: Record, layout: Layout = LAYOUT, slot: ModelSlot = TINY) -> pd.DataFrame:
    return table(results_of(results, layout.metrics), layout, [slot])


def tasks(*scores: tuple[float, float | None]) -> list[Record]:
    """Results of two tasks, with their standard errors."""
    return [
        result("score", 1.0, t, *each) for t, each in zip(("obqa", "piqa"), scores, strict=True)
    ]


def seeds(*scores: tuple[float, float | None]) -> list[Record]:
    """Results of as many seeds, the last first."""
    made = [result("random", 1.0, "obqa", *each, seed=seed) for seed, each in enumerate(scores)]
    return made[::-1]


@pytest.mark.parametrize(
    ("results", "row", "column", "value", "stderr"),
    [
        # The average is the mean over the tasks: sqrt(3² + 4²) / 2.
        (tasks((0.4, 0.03), (0.7, 0.04)), SCORE, AVERAGE, 55.0, 2.5),
        (tasks((0.5, 0.02), (0.5, None)), SCORE, AVERAGE, 50.0, None),
        # Documents: (3 + 3 + 6) / 3 = 4. Seeds: a deviation of 2 over three of them.
        (
            seeds((0.4, 0.03), (0.38, 0.06), (0.42, 0.03)),
            RANDOM,
            0,
            40.0,
            math.hypot(4, 2 / 3**0.5),
        ),
        (seeds(*[(0.5, 0.02)] * 10), RANDOM, 0, 50.0, 2.0),
        (seeds((0.5, 0.02)), RANDOM, 0, 50.0, 2.0),
        (seeds((0.5, 0.02), (0.5, None)), RANDOM, 0, 50.0, None),
    ],
    ids=["average", "unknown error", "seeds", "equal seeds", "one seed", "seed of unknown error"],
)
def test_errors_are_kept_honest(
    results: list[Record], row: int, column: int, value: float, stderr: float | None
) -> None:
    filled = toy(*results)
    mean = cell(filled, row, column)
    assert mean.value == pytest.approx(value)
    assert mean.stderr == pytest.approx(stderr or math.nan, nan_ok=True)
    seeds = sorted(seed for r in results if (seed := r.identity["method"].get("seed")) is not None)
    assert mean.seeds == ", ".join(map(str, seeds))
    hidden = any("leaves out the spread between seeds" in n for n in filled.attrs["notes"])
    assert hidden == (len(seeds) == 1)
    if column != AVERAGE:  # which is missing where a task is
        assert cell(filled, row, AVERAGE).status == "missing"


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            [result("random", 1.0, seed=0), result("random", 1.0, seed=1, n=100)],
            r"\(500 and 100\): .*random-.* and .*random-.*same limit",
        ),
        (
            [result("score", 1.0, knobs={"ep_size": size}) for size in (1, 8)],
            "two results.*score-g1-.* and .*score-g1-.*; keep one",
        ),
        (
            [result("random", 1.0, seed=size, knobs={"ep_size": size}) for size in (1, 8)],
            "different settings: .*random-.* and .*random-.*; keep one setting",
        ),
    ],
)
def test_results_that_are_no_entry_are_refused_by_name(results: list[Record], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        toy(*results)


# Paired tests against the baseline.


def graded(method: str, scores: str, subtask: str = "t", **given: Any) -> Record:
    """A run whose documents are right ("1") or wrong ("0")."""
    correct = [float(score) for score in scores]
    gamma = None if method == "baseline" else 1.0
    given = {"value": sum(correct) / len(correct), "documents": "hash"} | given
    return result(method, gamma, correct={subtask: correct}, **given)


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        ([], "the baseline is missing"),
        ([graded("baseline", "1111", documents="other")], "other documents"),
        ([graded("baseline", "1111", model="tiny_mixtral")], "the baseline is missing"),
    ],
)
def test_only_the_same_documents_are_paired(baseline: list[Record], reason: str) -> None:
    filled = toy(*baseline, graded("score", "1111"))
    test = cell(filled, SCORE)
    assert math.isnan(test.p)
    assert reason in test.untested
    note = "1 entry has no paired test: no baseline on the same documents."
    assert note in filled.attrs["notes"]


def test_tasks_of_the_same_documents_are_one_sample() -> None:
    """Ten documents lost in both tasks are ten and not twenty; errors do not shrink."""
    results = [
        graded(method, score * 10, task=task, stderr=error)
        for method, score in (("baseline", "1"), ("score", "0"))
        for task, error in (("obqa", 0.03), ("piqa", 0.05))
    ]
    filled = toy(*results, layout=dataclasses.replace(LAYOUT, same_documents=True))
    average = cell(filled, SCORE, AVERAGE)
    assert average.stderr == pytest.approx(4.0)
    assert average.p == 2 / 2**10
    assert average.effect == pytest.approx(-100.0)
    assert any("for the 3 tests of this table" in note for note in filled.attrs["notes"])


# Published numbers beside ours.


PAPER = ModelSlot("olmoe", "OLMoE")
PUBLISHED = dataclasses.replace(
    LAYOUT,
    tasks=(TaskColumn("obqa", "OBQA"), TaskColumn("rte", "RTE")),
    blocks=((RowSpec("Baseline", "baseline"), RowSpec("Score", "score", 1.0)),),
    paper_models=(PAPER,),
    average=None,
)


def test_published_numbers_stand_beside_ours() -> None:
    """Table 1 prints 45.6 for the baseline on OBQA; we have 43.6 ± 2.2 on 500 documents."""
    for stderr in (0.022, None):
        run = result("baseline", None, value=0.436, stderr=stderr, model="olmoe")
        filled = toy(run, layout=PUBLISHED, slot=PAPER)
        ours = cell(filled, 0)
        assert (ours.published, ours.difference) == (45.6, pytest.approx(-2.0))
        sampling = 100 * math.sqrt(0.456 * 0.544 / 500)
        z = -2.0 / math.sqrt(2.2**2 + sampling**2) if stderr else math.nan
        assert ours.z == pytest.approx(z, nan_ok=True)
        assert any(note.startswith("published: ") for note in filled.attrs["notes"])


@pytest.mark.parametrize(
    ("run", "slot", "gamma"),
    [
        (result("score", 1.0), TINY, 1.0),
        (result("score", 1.0, model="olmoe", data="miniworld"), PAPER, 1.0),
        (result("score", 1.25, model="olmoe"), PAPER, 1.25),
    ],
    ids=["another model", "other documents", "another γ"],
)
def test_what_was_not_published_stands_alone(run: Record, slot: ModelSlot, gamma: float) -> None:
    layout = dataclasses.replace(PUBLISHED, blocks=((RowSpec("Score", "score", gamma),),))
    filled = toy(run, layout=layout, slot=slot)
    assert len(measured(filled)) == 1
    assert filled["published"].isna().all()
    assert not any(note.startswith("published: ") for note in filled.attrs["notes"])


# Tables as the paper prints them, and from runs that measure what it prints.


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
