"""lm-eval's tasks, and ours, with their documents from wherever ``data.root`` says."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import lm_eval.utils
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory

from capmoe_eval.cell import TaskId
from capmoe_eval.datasource import EMBEDDED, DataSource, cache_directory
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.harness.provenance import hub_commit
from capmoe_eval.harness.task_index import task_manager
from capmoe_eval.longicl import TASKS_DIR as LONGICL
from capmoe_eval.miniworld import miniworld_hub
from capmoe_eval.mixtures import TASKS_DIR as MIXTURES
from capmoe_eval.tiny import synthetic_hub


def ready(source: DataSource) -> DataSource:
    """Return the source with its documents in place; embedded ones are written on first use."""
    if source.name not in EMBEDDED or source.root != Path(source.name):
        return source
    made = miniworld_hub() if source.name == "miniworld" else synthetic_hub()
    return DataSource(source.name, made)


class TaskLibrary:
    """Builds each task once and keeps it: building reads datasets, which takes time.

    An evaluation sets the shots of a kept task; what they were as built is kept with it
    (:func:`own_fewshot`), so that no cell inherits those of the cell before.
    """

    def __init__(self) -> None:
        self._managers: dict[DataSource, TaskManager] = {}
        self._built: dict[tuple[DataSource, str], dict[str, Any]] = {}

    def get(self, name: str, source: DataSource) -> dict[str, Any]:
        """Return lm-eval's tasks and groups of that name, as its ``evaluate`` takes them.

        Args:
            name: The task's name in lm-eval, or one of ours (LongICLBench).
            source: Where its documents come from; ready.

        Raises:
            UsageError: If the task or its dataset does not exist or cannot be reached.
        """
        key = (source, name)
        if key not in self._built:
            manager = self._manager(source)
            if name not in manager.all_tasks:
                raise bad_choice("task", name, manager.all_tasks)
            try:
                built = manager.load([name])
                _ask_first(built["tasks"])
                for task in built["tasks"].values():
                    task.capmoe_own_fewshot = task.get_config("num_fewshot") or 0
            except UsageError:
                raise
            except Exception as error:  # damaged files make datasets raise many kinds
                if source.root is None:
                    raise UsageError(
                        f"task={name}: its dataset cannot be loaded from the hub "
                        f"({_first_line(error)}); set data.root=DIR to a directory in hub layout"
                    ) from error
                raise UsageError(f"task={name}: {_first_line(error)}") from error
            self._built[key] = built
        return self._built[key]

    def check_metric(self, task: TaskId, source: DataSource) -> None:
        """Refuse a metric or a filter that none of a task's parts has.

        Raises:
            UsageError: Naming those that there are.
        """
        found = []
        for part in self.get(task.lm_eval, source)["tasks"].values():
            filters = part.get_config("filter_list") or [{"name": "none"}]
            found += [
                f"{metric},{each['name']}" for metric in part.aggregation() for each in filters
            ]
        key = f"{task.metric},{task.filter}"
        if key not in found:
            raise bad_choice(f"task {task.name}: metric,filter", key, dict.fromkeys(found))

    def fingerprint(self, task: TaskId, source: DataSource) -> str | None:
        """Return what tells a task's documents from others of that name.

        Returns:
            The hash of a local root's files; the commit of the hub's datasets, several joined by
            ``+``; None where that is not known.
        """
        local = source.fingerprint(task.dataset)
        if local is not None:
            return local
        tasks = self.get(task.lm_eval, source)["tasks"].values()
        commits = list(dict.fromkeys(hub_commit(built.dataset) for built in tasks))
        return None if None in commits else "+".join(str(commit) for commit in commits)

    def _manager(self, source: DataSource) -> TaskManager:
        if source not in self._managers:
            manager = copy.copy(_all_tasks())
            manager._factory = _RootedFactory(source)
            self._managers[source] = manager
        return self._managers[source]


@functools.cache
def _all_tasks() -> TaskManager:
    """Return the task manager that the sources' own are copies of."""
    _keep_templates()
    return task_manager([LONGICL, MIXTURES])


def _keep_templates() -> None:
    """Have lm-eval compile a prompt's template once, not anew for every document and shot.

    It was two thirds of the time of a tiny model's 25-shot cell.
    """
    environment = lm_eval.utils.env
    if not isinstance(vars(environment).get("from_string"), functools._lru_cache_wrapper):
        kept = functools.lru_cache(maxsize=1024)(environment.from_string)
        environment.from_string = kept


def _ask_first(tasks: dict[str, Any]) -> None:
    """Make a prompt of each task's first document, so that a column that is missing is noticed.

    lm-eval takes the name of a column that is not there for the prompt itself.

    Raises:
        LookupError: If a column is not there.
        TemplateError: If a template needs what is not there.
    """
    for name, task in tasks.items():
        for field in ("doc_to_text", "doc_to_choice", "doc_to_target"):
            column = task.get_config(field)
            if isinstance(column, str) and column.isidentifier() and column not in task.features:
                raise LookupError(f"{name}: its documents have no column {column!r}")
        document = next(iter(task.eval_docs), None)
        if document is not None:
            task.doc_to_text(document)
            task.doc_to_target(document)


class _RootedFactory(TaskFactory):
    """Builds tasks whose dataset path leads into the root."""

    def __init__(self, source: DataSource) -> None:
        super().__init__()
        self._source = source

    def _load_full_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config: dict[str, Any] = super()._load_full_config(*args, **kwargs)
        dataset = config.get("dataset_path")
        directory = self._source.directory(dataset) if isinstance(dataset, str) else None
        if directory is not None:
            config["dataset_path"] = str(directory)
            # datasets keys its cache by the directory's name and the files' names, so two roots
            # could be taken for one another: each content gets a cache of its own.
            fingerprint = self._source.fingerprint(str(dataset))
            cache = cache_directory() / "datasets" / str(fingerprint)
            config["dataset_kwargs"] = {
                **(config.get("dataset_kwargs") or {}),
                "cache_dir": str(cache),
            }
        return config


def own_fewshot(task: Any) -> int:
    """Return the few-shot examples that a task of the library was built with."""
    return int(task.capmoe_own_fewshot)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
