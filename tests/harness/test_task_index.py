"""The kept index of lm-eval's tasks is what lm-eval would build, and never a stale one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex

from capmoe_eval.datasource import cache_directory
from capmoe_eval.harness.task_index import kept_index, task_manager
from capmoe_eval.longicl import TASKS_DIR


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Note which directories are read file by file."""
    directories: list[Path] = []
    build = TaskIndex.build

    def noting(paths: list[Path]) -> Any:
        directories.extend(paths)
        return build(paths)

    monkeypatch.setattr(TaskIndex, "build", staticmethod(noting))
    return directories


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks with a tag and a group of them; and a cache that knows nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "tasks"
    (directory / "below").mkdir(parents=True)
    (directory / "common").write_text("dataset_path: nowhere\n")
    (directory / "one.yaml").write_text("task: one\ninclude: common\ntag: both\n")
    (directory / "below" / "two.yaml").write_text("task: two\ntag: [both, second]\n")
    (directory / "all.yaml").write_text("group: all\ntask: [one, two]\n")
    return directory


def said(directory: Path) -> dict[str, tuple[str, str | None, list[str]]]:
    return {
        name: (entry.kind.name, entry.yaml_path and entry.yaml_path.name, sorted(entry.tags))
        for name, entry in kept_index(directory).items()
    }


EXPECTED = {
    "all": ("GROUP", "all.yaml", []),
    "one": ("TASK", "one.yaml", ["both"]),
    "two": ("TASK", "two.yaml", ["both", "second"]),
    "both": ("TAG", None, ["one", "two"]),
    "second": ("TAG", None, ["two"]),
}


def test_it_is_read_once(tasks: Path, built: list[Path]) -> None:
    assert said(tasks) == EXPECTED
    assert said(tasks) == EXPECTED
    assert built == [tasks]


@pytest.mark.parametrize("change", ["new", "edited", "included", "gone"])
def test_any_change_below_is_seen(tasks: Path, built: list[Path], change: str) -> None:
    said(tasks)
    expected = dict(EXPECTED)
    if change == "new":
        (tasks / "below" / "three.yaml").write_text("task: three\n")
        expected["three"] = ("TASK", "three.yaml", [])
    elif change == "edited":
        (tasks / "one.yaml").write_text("task: one\ninclude: common\n")
        expected |= {"one": ("TASK", "one.yaml", []), "both": ("TAG", None, ["two"])}
    elif change == "included":
        (tasks / "common").write_text("dataset_path: nowhere\ntag: second\n")
    else:
        (tasks / "all.yaml").unlink()
        del expected["all"]
    assert said(tasks) == expected
    assert built == [tasks, tasks]


@pytest.mark.parametrize("text", ["", "{}", '{"fingerprint": 1, "entries": []}', "[1"])
def test_a_spoilt_cache_is_built_anew(tasks: Path, built: list[Path], text: str) -> None:
    said(tasks)
    (kept,) = (cache_directory() / "tasks").iterdir()
    kept.write_text(text)
    assert said(tasks) == EXPECTED
    assert said(tasks) == EXPECTED
    assert built == [tasks, tasks]


def test_a_cache_that_cannot_be_written_is_no_mistake(
    tasks: Path, built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert said(tasks) == said(tasks) == EXPECTED
    assert len(built) == 1, "a temporary directory takes its place"


def test_all_of_lm_evals_tasks_are_found_as_lm_eval_finds_them() -> None:
    stock = TaskManager(include_path=[str(TASKS_DIR)])
    task_manager([TASKS_DIR])
    again = task_manager([TASKS_DIR])
    assert list(again.task_index) == list(stock.task_index)
    for name, entry in stock.task_index.items():
        ours = again.task_index[name]
        assert (ours.kind, ours.yaml_path, ours.tags) == (entry.kind, entry.yaml_path, entry.tags)
    for names in ("all_tasks", "all_groups", "all_tags", "all_subtasks"):
        assert getattr(again, names) == getattr(stock, names)
