"""The few folders that a task needs hold what lm-eval finds in all of them; bad documents."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest
from datasets import Dataset
from lm_eval.__main__ import HarnessCLI
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation import lm_eval_command
from capmoe_eval.evaluation.tasks import OURS, TaskLibrary, task_manager, without_right_choice
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


def of_rows(rows: list[dict[str, Any]], **settings: Any) -> ConfigurableTask:
    """A task of lm-eval about documents that are at hand."""
    columns = {"doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer"}
    config = {
        "task": "mine",
        "test_split": "test",
        "output_type": "multiple_choice",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        **columns,
        **settings,
    }
    return ConfigurableTask(config=config)


def rows_with(*answers: Any, choices: Sequence[str] = ("Tea", "Iron")) -> list[dict[str, Any]]:
    return [{"question": "Which?", "choices": [*choices], "answer": answer} for answer in answers]


@pytest.mark.parametrize(
    ("answers", "settings", "numbers"),
    [
        ((0, 1, 2, -1, 1), {}, [2, 3]),
        (("Tea", "tea", "Iron"), {}, [1]),
        (([0, 5], [2, 3]), {}, [1]),
        ((0, 0, 7), {"doc_to_text": "answer", "doc_to_target": "question"}, [2]),
        ((0, 7), {"process_results": lambda _document, _results: {}}, []),
        (("Tea", "Gold"), {"output_type": "generate_until", "doc_to_choice": None}, []),
    ],
)
def test_documents_without_a_right_choice_are_told(
    answers: tuple[Any, ...], settings: dict[str, Any], numbers: list[int]
) -> None:
    task = of_rows(rows_with(*answers), **settings)
    assert [*without_right_choice(task, None)] == numbers
    first = numbers[0] if numbers else 1
    assert [*without_right_choice(task, first)] == []


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (rows_with(0, choices=["Tea", ""]), "an empty choice; change it, or the task's doc_to_ch"),
        (rows_with(2), "the answer 2, counted from 0, and 2 choices; change it, or the task's"),
    ],
)
def test_a_first_document_that_lm_eval_does_not_take_is_told_with_its_field(
    rows: list[dict[str, Any]], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskManager, "load", lambda *_: of_rows(rows))
    with pytest.raises(UsageError, match=f"^task=mine: document 0 has {line}"):
        TaskLibrary().get("banking77_intent", DataSource("mine", None))
    monkeypatch.setattr(HarnessCLI, "parse_args", lambda _: Namespace())
    monkeypatch.setattr(HarnessCLI, "execute", lambda *_: of_rows(rows))
    with pytest.raises(UsageError, match=f"^task=mine: document 0 has {line}"):
        lm_eval_command._run()
