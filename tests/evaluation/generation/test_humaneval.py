"""HumanEval asks as lm-eval's own task does, and runs nothing that was not allowed."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.tasks
import pytest
import yaml

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation import programs
from capmoe_eval.evaluation.generation.sandbox import Sandbox
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.run import run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.configuration import Placement, Plan, load_option
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import read_record
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.hub import ready

SPEC = load_option("tasks", "humaneval")["humaneval"]
TASK = TaskId("humaneval", SPEC.lm_eval, SPEC.dataset, SPEC.metric, SPEC.fewshot, SPEC.filter)


def plan(root: Path, **changes: Any) -> Plan:
    model = ModelId("zoo_olmoe", "zoo:olmoe", dtype="float32")
    cell = Cell(model, create_method("baseline"), TASK, 4, limit=4, data="miniworld")
    return dataclasses.replace(
        Plan(cell, data_source("miniworld"), root, Placement("cpu", threads=1)), **changes
    )


@pytest.fixture(scope="module")
def library() -> TaskLibrary:
    return TaskLibrary()


def configured(path: Path) -> dict[str, Any]:
    """Return a task's YAML file with its functions by their names."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    config: dict[str, Any] = yaml.load(path.read_text("utf-8"), Loader)
    return config


def test_prompts_stops_and_lengths_are_lm_evals() -> None:
    theirs = configured(Path(lm_eval.tasks.__file__).parent / "humaneval/humaneval.yaml")
    ours = configured(Path(programs.__file__).with_name("humaneval.yaml"))
    differing = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    assert differing == {
        "task",
        "class",
        "process_results",
        "metric_list",
        "filter_list",
        "repeats",
    }
    assert theirs["repeats"] == 1  # lm-eval's default


def test_our_key_and_lm_evals_name_are_one_task() -> None:
    assert load_option("tasks", "capmoe_humaneval") == load_option("tasks", "humaneval")
    assert TASK.lm_eval != "humaneval"  # which would be lm-eval's own


def test_each_document_has_the_verdict_on_its_own_program(
    library: TaskLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = library.get(TASK.lm_eval, ready(data_source("miniworld")))["tasks"].values()
    task.build_all_requests(limit=6)
    for instance in task.instances:
        right = instance.doc_id in (1, 4)
        instance.resps = [instance.doc["canonical_solution"] if right else "    return None\n"]
    try:
        task.sandbox = Sandbox.open()
    except UsageError as error:
        pytest.skip(str(error))
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(task, "on_judged", lambda *counts: shown.append(counts))
    task.apply_filters()
    scores = {
        each.doc_id: task.process_results(each.doc, [each.filtered_resps["none"]])
        for each in task.instances
    }
    assert scores == {number: {"pass@1": float(number in (1, 4))} for number in range(6)}
    assert task.verdicts == {"passed": 2, "wrong": 4}
    assert shown[-1] == (6, 6)


def test_without_the_flag_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "judge", pytest.fail)
    with pytest.raises(
        UsageError, match=r"tasks=humaneval: .*allow_code_execution=true"
    ) as refused:
        run([plan(tmp_path)])
    assert "apt install bubblewrap" in str(refused.value)
    assert not list(tmp_path.rglob("*.json"))


def test_without_bubblewrap_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "judge", pytest.fail)
    with pytest.raises(UsageError, match="not installed; apt install bubblewrap"):
        run([plan(tmp_path / "results", allow_code_execution=True)])


def test_a_task_that_runs_programs_without_a_sandbox_is_refused(
    library: TaskLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = {"tasks": {"mbpp": SimpleNamespace(UNSAFE_CODE=True)}}
    monkeypatch.setattr(library, "get", lambda *_: unsafe)
    mbpp = dataclasses.replace(TASK, name="mbpp", lm_eval="mbpp")
    with pytest.raises(UsageError, match=r"tasks.mbpp.lm_eval=mbpp: .* without a sandbox"):
        library.check_programs(mbpp, data_source("miniworld"))


def test_a_record_says_what_was_executed(tmp_path: Path) -> None:
    try:
        sandbox = Sandbox.open()
    except UsageError as error:
        pytest.skip(str(error))
    allowed = plan(tmp_path, allow_code_execution=True)
    assert allowed.path == plan(tmp_path).path
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    (record,) = run([allowed], Progress(1, shown)).records
    assert "4 of 4 programs judged" in shown.getvalue()
    executed = read_record(record.path, tmp_path).capmoe["executed"]
    verdicts = executed.pop("verdicts")
    assert executed == {
        **sandbox.description(),
        "at_once": programs.at_once(),
        "tried_again": 0,
    }
    (part,) = record.subtasks.values()
    assert sum(part.correct) == verdicts.get("passed", 0)
    assert sum(verdicts.values()) == len(part.correct) == 4
    assert record.value == sum(part.correct) / 4
    # A finished cell needs no permission.
    assert run([plan(tmp_path)]).computed == 0
