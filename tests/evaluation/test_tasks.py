"""The few folders that a task needs hold what lm-eval finds in all of them."""

from __future__ import annotations

from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from capmoe_eval.evaluation.tasks import OURS, task_manager
from capmoe_eval.experiment.composition import load_option, options

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


@pytest.mark.parametrize("name", NAMES)
def test_not_all_of_lm_evals_folders_are_read_for_our_tasks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TaskManager.__init__

    def refusing(self: TaskManager, **arguments: Any) -> None:
        assert arguments.get("include_defaults", True) is False
        build(self, **arguments)

    monkeypatch.setattr(TaskManager, "__init__", refusing)
    task_manager(name)
