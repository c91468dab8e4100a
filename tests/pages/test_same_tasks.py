"""Numbers beside each other are of the same tasks, and the page names these tasks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection

import pandas as pd
import pytest
from capmoe_report.evidence import Side

from capmoe_eval.experiment.names import family, method_title
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.printed import find_row
from capmoe_eval.results.frames import pick
from capmoe_eval.routing.registry import method_names
from pages import DOCS, glance, present
from pages.effects import findings, replication
from pages.embedded import _GRIDS, _SIZES
from pages.names import exploratory, results
from tests.pages.test_records import contrasts, links, over_families, read

TASKS = {column.heading: column.task for column in ALL_TASKS}


def tasks_in(text: str) -> list[str]:
    """Return the tasks that a text names in the words of the paper's tables."""
    return [task for heading, task in TASKS.items() if re.search(rf"\b{heading}\b", text)]


def cells_of(block: str) -> list[list[str]]:
    """Return the rows of the tables of a block, heads included."""
    lines = (line for line in present()[block].splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def points_of(text: str) -> float:
    """Return the first number of a cell."""
    return float(text.split(maxsplit=1)[0].replace("−", "-"))


def gap(first: pd.DataFrame, second: pd.DataFrame, tasks: Collection[str]) -> float:
    """Return the mean difference of the scores on some tasks that need experts, in points."""
    idle = exploratory().idle
    scores = []
    for side in (first, second):
        of_side = side[side["task"].isin(tasks)]
        rows = zip(of_side["model"], of_side["task.lm_eval"], strict=True)
        of_side = of_side[[task not in idle[model] for model, task in rows]]
        scores.append(100 * of_side.groupby(["model", "task"])["value"].mean())
    return over_families(scores[0] - scores[1])


def test_every_row_beside_table_1_is_of_the_tasks_that_its_head_names() -> None:
    head, *rows = cells_of("same-tasks")
    tasks = tasks_in(head[2])
    headings = [heading for heading, task in TASKS.items() if task in tasks]
    assert len(tasks) >= 4
    for label, _, printed, ours in rows:
        sides, means = [], []
        for text in label.split(" − "):
            name, _, gamma = text.partition(" γ=")
            knobs = {"gamma": float(gamma)} if gamma else {}
            side = Side(method=name.replace(" ", "_"), **knobs)
            sides.append(exploratory().pick(side, *exploratory().pooled))
            row = find_row({"table": 1, "method": name.title(), **knobs})
            means.append(statistics.fmean(row.values[heading] for heading in headings))
        assert points_of(printed) == pytest.approx(means[0] - means[1], abs=0.0501)
        assert points_of(ours) == pytest.approx(gap(sides[0], sides[1], tasks), abs=0.0501), label


def test_every_point_of_the_picture_is_of_the_tasks_and_questions_that_the_captions_name() -> None:
    compared = []
    for line in contrasts(glance.RECORDS):
        records = read(line, glance.RECORDS.parent)
        counts = {record.task: record.n for record in records}
        models = {(record.model, record.task) for record in records}
        compared.append((models, sum(counts.values()), set(counts)))
    assert len(compared) > 12
    assert all(each == compared[0] for each in compared)
    _, questions, tasks = compared[0]
    for block in ("glance", "headline"):
        number, named = re.findall(r"([\d,]+)\s+questions of ([\w\s,-]+)", present()[block])[0]
        assert int(number.replace(",", "")) == questions
        assert set(tasks_in(named)) == tasks
    files = {file for _, file, _ in links(present()["headline"], DOCS)}
    assert files == {glance.RECORDS}


def test_gaps_beside_those_in_print_are_of_the_same_tasks() -> None:
    printed, *rows = replication().grouping
    tasks = sorted(tasks_in(printed.label))
    for row in rows:
        for finding in row.gaps:
            (named,) = re.findall(r"([\w, ]+) \(families", finding.compared)
            assert named.split(", ") == tasks, (row.label, finding.label)


def test_a_contrast_of_several_tasks_is_of_those_that_need_experts_and_names_them() -> None:
    methods = {method_title(name): name for name in method_names()}
    idle = {task for model in _SIZES for task in exploratory().idle[model]}
    grids, count = iter(_GRIDS), 0
    for first, _, *points in cells_of("size-changes"):
        if "PIQA" in first:  # the head of a table
            cells, tasks = results(next(grids)).cells, tasks_in(first)
            assert not idle & set(tasks)
            continue
        title, _, gamma = first.partition(" γ=")
        where = {"gamma": float(gamma)} if gamma else {}
        bounded = pick(cells, method=methods[title], **where)
        sides = (bounded, pick(cells, method="baseline"))
        expected = [gap(*(pick(side, model=model) for side in sides), tasks) for model in _SIZES]
        expected.append(expected[1] - expected[0])
        assert [points_of(text) for text in points] == pytest.approx(expected, abs=0.0501), first
        count += 1
    assert count == 7
    text = present()["placed-drops"]
    tasks, placed = tasks_in(text), pick(results("experiment=placed").cells, gamma=1.0)
    changed = gap(pick(placed, placement="eplb"), pick(placed, placement=None), tasks)
    (number,) = re.findall(r"changes\s+by\s+(\S+)", text)
    assert points_of(number) == pytest.approx(changed, abs=0.00501)
    assert not {"rte", "boolq"} & set(tasks)


def test_one_family_is_given_with_its_training_seeds() -> None:
    """A mean over documents says nothing of the training where one seed carries it."""
    text = (DOCS / "zoo" / "replication.md").read_text("utf-8")
    count = 0
    for claim in replication().claims:
        for finding in claim.contrasts:
            is_of_one = finding.unit == "points" and len(set(map(family, finding.models))) == 1
            line = re.search(rf"^- {re.escape(finding.label)}: \[.*", text, re.MULTILINE)
            if is_of_one and len(finding.models) > 1 and line:
                seeds = ", ".join(f"{points:+.2f}" for points in finding.models.values())
                assert line[0].endswith(f"; training seeds {seeds}")
                count += 1
    assert count >= 4
    (failing,) = (each for each in findings("o2") if each.verdict == "contradicted")
    _, sentence = present()["rests-on"].split("- (o2)")
    stated = [points_of(text) for text in re.findall(r"[−+]\d+\.\d\d", sentence)]
    assert stated[:-1] == [round(points, 2) for points in failing.models.values()]
