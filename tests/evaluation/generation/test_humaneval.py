"""HumanEval asks as lm-eval's task does and runs nothing that was not allowed; Table 7's cells."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation import programs
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.run import check_task, run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import read_record
from capmoe_eval.zoo.hub import ready
from tests.records import planned

SPEC = load_option("tasks", "humaneval")["humaneval"]
TASK = TaskId("humaneval", SPEC.lm_eval, SPEC.dataset, SPEC.metric, SPEC.fewshot, SPEC.filter)
ALLOWED = "allow_code_execution=true"


def plan(root: Path, *words: str) -> CellPlan:
    more = ("batch_size=4", "limit=4", "threads=1", f"results_dir={root}", *words)
    (each,) = planned("model=zoo_olmoe", "tasks=humaneval", "method=baseline", *more)
    return each


@pytest.fixture(scope="module")
def library() -> TaskLibrary:
    return TaskLibrary()


@pytest.fixture(name="sandbox")
def tried() -> dict[str, Any]:
    """What a record says of the sandbox."""
    try:
        return programs.sandbox()[1]
    except UsageError as error:
        pytest.skip(str(error))


def test_prompts_stops_and_lengths_are_lm_evals() -> None:
    folder = Path(lm_eval.tasks.__file__).parent
    theirs = load_yaml(folder / "humaneval/humaneval.yaml", resolve_func=False)
    ours = load_yaml(Path(programs.__file__).with_name("humaneval.yaml"), resolve_func=False)
    differing = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    keys = {"task", "class", "process_results", "metric_list", "filter_list", "repeats"}
    assert differing == keys
    assert theirs["repeats"] == 1  # lm-eval's default
    assert load_option("tasks", "capmoe_humaneval") == load_option("tasks", "humaneval")
    assert TASK.lm_eval != "humaneval"  # which would be lm-eval's own


def test_each_document_has_the_verdict_on_its_own_program(
    library: TaskLibrary, sandbox: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = library.get(TASK.lm_eval, ready(data_source("miniworld")))["tasks"].values()
    task.build_all_requests(limit=6)
    for instance in task.instances:
        right = instance.doc_id in (1, 4)
        instance.resps = [instance.doc["canonical_solution"] if right else "    return None\n"]
    counts: list[tuple[str, int, int]] = []
    monkeypatch.setattr(task, "on_progress", lambda *progress: counts.append(progress))
    task.apply_filters()
    scores = {
        each.doc_id: task.process_results(each.doc, [each.filtered_resps["none"]])
        for each in task.instances
    }
    assert scores == {number: {"pass@1": float(number in (1, 4))} for number in range(6)}
    assert task.verdicts == {"passed": 2, "failed": 4}
    assert counts[-1] == ("programs", 6, 6)


def test_a_task_that_runs_programs_without_a_sandbox_is_refused(
    library: TaskLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = SimpleNamespace(
        UNSAFE_CODE=True, aggregation=lambda: {"pass@1": None}, get_config=lambda _: None
    )
    monkeypatch.setattr(library, "get", lambda *_: {"tasks": {"mbpp": unsafe}})
    mbpp = dataclasses.replace(TASK, name="mbpp", lm_eval="mbpp")
    with pytest.raises(UsageError, match=r"tasks.mbpp.lm_eval=mbpp: .* without a sandbox"):
        check_task(library, mbpp, data_source("miniworld"))


def test_a_record_says_what_was_executed(tmp_path: Path, sandbox: dict[str, Any]) -> None:
    allowed = plan(tmp_path, ALLOWED)
    assert allowed.path == plan(tmp_path).path
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    (record,) = run([allowed], Progress(1, stream)).records
    assert "4 of 4 programs, 00:00 left" in stream.getvalue()
    executed = read_record(record.path, tmp_path).capmoe["executed"]
    verdicts = executed.pop("verdicts")
    assert executed == {**sandbox, "at_once": programs.at_once()}
    (part,) = record.documents.values()
    assert sum(part.correct) == verdicts.get("passed", 0)
    assert sum(verdicts.values()) == len(part.correct) == 4
    assert record.value == sum(part.correct) / 4
    # A finished cell needs no permission.
    assert run([plan(tmp_path)]).computed == 0
