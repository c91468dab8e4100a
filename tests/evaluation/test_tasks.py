"""The few folders that a task needs hold what lm-eval finds in all of them; bad documents."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.tasks import OURS, TaskLibrary, task_manager
from capmoe_eval.experiment.composition import load_option, options
from capmoe_eval.experiment.datasource import DataSource

NAMES = sorted(
    {
        spec.lm_eval
        for key in options("tasks")
        for spec in [load_option("tasks", key).get(key)]
        if spec
    }
)


@pytest.fixture(scope="module")
def everything() -> TaskManager:
    """lm-eval's own manager, over all of its folders and ours."""
    return TaskManager(include_path=[str(path) for path in OURS])


def parts(manager: TaskManager, name: Any) -> dict[str, Any]:
    """Return the file of a name and of all that it consists of, and what tags stand for."""
    entry = manager.task_index[name]
    members = (entry.cfg or {}).get("task")
    below = [*(members if isinstance(members, list) else [])]
    if entry.yaml_path is None:
        below += entry.tags
    entries = {name: (entry.kind.name, entry.yaml_path)}
    for member in below:
        entries |= parts(manager, member if isinstance(member, str) else member["task"])
    return entries


# Beside ours: a group whose parts lie in other folders, and a tag.
@pytest.mark.nightly
@pytest.mark.parametrize("name", [*NAMES, "openllm", "arithmetic"])
def test_a_task_is_what_lm_eval_finds_in_all_folders(name: str, everything: TaskManager) -> None:
    assert parts(task_manager(name), name) == parts(everything, name)


def of_rows(rows: list[dict[str, Any]]) -> ConfigurableTask:
    """A task of lm-eval about documents that are at hand."""
    config = {
        "task": "mine",
        "test_split": "test",
        "output_type": "multiple_choice",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        **{"doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer"},
    }
    return ConfigurableTask(config=config)


@pytest.mark.parametrize(("choices", "answer"), [(["Tea", ""], 0), (["Tea", "Iron"], 2)])
def test_a_first_document_that_lm_eval_does_not_take_is_told(
    choices: list[str], answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": "Which?", "choices": choices, "answer": answer}]
    monkeypatch.setattr(TaskManager, "load", lambda *_: of_rows(rows))
    with pytest.raises(UsageError, match=r"^task=\S+: its first document has an empty choice, or"):
        TaskLibrary().get("banking77_intent", DataSource("mine", None))
