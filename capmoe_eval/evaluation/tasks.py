"""Build lm-eval's tasks and ours, with their documents from ``data.root`` or the hub."""

import functools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import lm_eval.tasks
import lm_eval.utils
from lm_eval.api.registry import (
    AGGREGATION_REGISTRY,
    METRIC_AGGREGATION_REGISTRY,
    METRIC_REGISTRY,
)
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory

from capmoe_eval.errors import UsageError, bad_choice, first_line
from capmoe_eval.evaluation.provenance import documents_hash, hub_commit
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.composition import data_files, hashed_config
from capmoe_eval.experiment.datasource import DataSource, cache_directory
from capmoe_eval.experiment.names import BITS_PER_BYTE

#: The folders of the suite's own tasks: their YAML files, and what those need.
OURS = tuple(
    Path(__file__).with_name(name)
    for name in ("banking77", "generation", "longicl", "mixtures", "multimodal", "passages")
)


# The metrics of which lm-eval has a number of each document, by the kind of the answers.
_NUMBERS: Final = {
    "loglikelihood": ["acc", "perplexity"],
    "loglikelihood_rolling": [BITS_PER_BYTE],
    "multiple_choice": ["acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"],
    "generate_until": ["exact_match"],
}


class YamlTask(ConfigurableTask):
    """A task of lm-eval whose YAML file names a class of ours."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        # "class" names this class in a YAML file; it is not a setting of the task.
        super().__init__(config={key: value for key, value in config.items() if key != "class"})


class TaskLibrary:
    """Builds each task once and keeps it: building reads datasets, which takes time.

    An evaluation sets the shots of a kept task. Each task keeps those that it was built with, as
    ``capmoe_own_fewshot``, so that no cell inherits the shots of the cell before.
    """

    def __init__(self) -> None:
        _keep_templates()
        self._built: dict[tuple[DataSource, str, str | None], dict[str, Any]] = {}

    def get(
        self, name: str, source: DataSource, dataset: str | None = None, setting: str = ""
    ) -> dict[str, Any]:
        """Return lm-eval's tasks and groups of that name, or ours, as its ``evaluate`` takes them.

        The documents are in place (:func:`ready`). ``dataset`` is the data set that it reads, of a
        group all of them, joined by ``+``; None for that of its file. Only a task that is no group
        can read another than its file says. ``setting`` is what the user wrote, for errors.

        Raises:
            UsageError: If the task or its dataset does not exist or cannot be reached.
        """
        setting = f"tasks={source.file}" if source.file else setting or f"task={name}"
        key = (source, name, dataset)
        if key not in self._built:
            manager = task_manager(name, source.file and source.file.parent)
            if name not in manager.all_tasks:
                raise bad_choice("task", name, manager.all_tasks)
            if source.file not in (None, path := manager.task_index[name].yaml_path):
                raise UsageError(
                    f"tasks={source.file}: {path} declares {name}, too; rename one of the tasks"
                )
            manager._factory = factory = _RootedFactory(source, name, dataset)
            try:
                tasks = manager.load([name])
                factory.check(setting)
                _ask_first(tasks["tasks"])
            except UsageError:
                raise
            except IndexError as error:  # of lm-eval, without a word on why
                raise UsageError(
                    f"{setting}: its first document has an empty choice, or an answer beyond its "
                    "choices; change it, or the task's doc_to_choice or doc_to_target"
                ) from error
            except Exception as error:  # damaged files make datasets raise many kinds
                if source.file is None and source.root is None:
                    raise UsageError(
                        f"{setting}: its dataset cannot be loaded from the hub "
                        f"({first_line(error)}); set data.root=DIR to a directory in hub layout"
                    ) from error
                config = hashed_config(source.file, setting)[0] if source.file else {}
                is_list = "malformed node" in str(error)  # of the text that stands for the choices
                hint = "; doc_to_choice must be a column or a list" if is_list else ""
                raise UsageError(f"{setting}: {_damage(config, error)}{hint}") from error
            for task in tasks["tasks"].values():
                task.capmoe_own_fewshot = task.get_config("num_fewshot") or 0
            self._built[key] = tasks
        return self._built[key]

    def parts(self, task: TaskId, source: DataSource) -> dict[str, Any]:
        """Return the tasks that a task consists of by name, as :meth:`get`."""
        setting = f"tasks={task.name}"
        tasks: dict[str, Any] = self.get(task.lm_eval, source, task.dataset, setting)["tasks"]
        return tasks

    def fingerprint(self, task: TaskId, source: DataSource) -> str | None:
        """Return the hash of a task's local files, or the commits of its datasets on the hub.

        Several commits are joined by ``+``; None if one is unknown.
        """
        if (local := source.fingerprint(task.dataset)) is not None:
            return local
        tasks = self.parts(task, source).values()
        commits = list(dict.fromkeys(hub_commit(part.dataset) for part in tasks))
        return None if None in commits else "+".join(str(commit) for commit in commits)

    def documents(self, task: TaskId, source: DataSource, limit: int | None) -> str | None:
        """Return the hash that a record will have of the documents of a user's own task.

        None for another task, whose data have a fingerprint.
        """
        if source.file is None or task.images:
            return None
        (part,) = self.parts(task, source).values()
        hashes, plain = list[str](), lm_eval.utils.handle_non_serializable
        for _, document in part.doc_iterator(limit=limit):
            part.doc_to_text(document)  # may change it before lm-eval hashes it
            part.doc_to_target(document)
            text = json.dumps(document, indent=2, default=plain, ensure_ascii=False)
            hashes.append(lm_eval.utils.hash_string(text))
        return documents_hash(hashes)


def _damage(config: Mapping[str, Any], error: Exception) -> str:
    """Return what is wrong with the documents of a user's task, if it has a config, or an error."""
    files = data_files(config)
    if empty := [file for file in files if not file.stat().st_size]:
        return f"{empty[0]} is empty"
    reads = files and type(error).__module__.startswith(("datasets", "pyarrow"))
    names = f"{', '.join(map(str, files[:3]))}: " if reads else ""
    return names + first_line(error.__cause__ or error)


def check_metric(task: TaskId, part: ConfigurableTask) -> None:
    """Refuse a metric of which lm-eval has no number of each document (UsageError).

    A function in Python, of a file or of ours, may compute one for it.
    """
    is_lm_evals = getattr(type(part), "process_results", None) is ConfigurableTask.process_results
    if not is_lm_evals or part.get_config("process_results") is not None:
        return
    entries, numbers = part.get_config("metric_list") or (), _NUMBERS[part.OUTPUT_TYPE]
    of_evaluate = [entry["metric"] for entry in entries if entry.get("hf_evaluate")]
    if task.metric in METRIC_AGGREGATION_REGISTRY and task.metric not in [*numbers, *of_evaluate]:
        raise UsageError(
            f"tasks.{task.name}.metric={task.metric}: is of all documents together, and records "
            f"have a number of each; choose {' or '.join(numbers)} in the metric_list of its file"
        )


def task_manager(name: str, include_path: Path | None = None) -> TaskManager:
    """Return lm-eval's task manager over our tasks and the folders that a task or group needs.

    ``include_path`` is the folder of a user's own tasks.

    Parsing all of lm-eval's 14,000 files takes longer than evaluating a small model. All are parsed
    only for a name that no file declares: a tag, or a mistake.
    """
    folders = [] if include_path is None else [str(include_path)]
    ours = [str(path) for path in OURS]
    while True:
        manager = TaskManager(include_defaults=False, include_path=[*folders, *ours])
        index = manager.task_index
        missing = next((part for part in _parts(name, index) if part not in index), None)
        if missing is None:
            return manager
        folder = _folder(missing)
        if folder is None or folder in folders:
            return TaskManager(include_path=[*folders, *ours])
        folders.append(folder)


def _parts(name: str, index: Mapping[str, Any]) -> Iterator[str]:
    """Yield a name and, if it is a group, the names of its members that the index knows."""
    yield name
    config = index[name].cfg if name in index else None
    members = (config or {}).get("task")
    for member in members if isinstance(members, list) else []:
        part = member.get("group") or member.get("task") if isinstance(member, dict) else member
        yield from _parts(str(part), index)


def _folder(name: str) -> str | None:
    """Return the folder of the file of lm-eval that declares a task or group, or None."""
    quote = "[\"']?"
    declared = re.compile(
        rf"(?m)^{quote}(?:task|group){quote}: *{quote}{re.escape(name)}{quote} *$"
    )
    for path in sorted(_files(), key=lambda path: name not in path):  # likely ones first
        if declared.search(Path(path).read_text(encoding="utf-8")):
            return str(Path(path).parent)
    return None


@functools.cache
def _files() -> list[str]:
    walk = os.walk(Path(lm_eval.tasks.__file__).parent)  # ten times as fast as Path.rglob
    return [f"{top}/{name}" for top, _, names in walk for name in names if name.endswith(".yaml")]


def _keep_templates() -> None:
    """Have lm-eval compile a prompt's template once, not anew for every document and shot.

    It was two thirds of the time of a tiny model's 25-shot cell.
    """
    environment = lm_eval.utils.env
    if isinstance(vars(environment).get("from_string"), functools._lru_cache_wrapper):
        return
    compiled = environment.from_string

    @functools.lru_cache(maxsize=1024)
    def template(source: str) -> Any:
        kept = compiled(source)
        kept.globals = dict(kept.globals)  # every prompt copies them, slowly of a ChainMap
        return kept

    environment.from_string = template


def _ask_first(tasks: dict[str, Any]) -> None:
    """Make a prompt of each task's first document, so that a column that is missing is noticed.

    lm-eval takes the name of a missing column for the prompt itself.
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
    """Builds tasks whose dataset path leads into the root, one that is no group from any data set.

    lm-eval's ``TaskManager.load`` can override a field only for all members of a group at once, and
    the members of a group may read different datasets; so its factory is replaced.
    """

    def __init__(self, source: DataSource, name: str, dataset: str | None) -> None:
        super().__init__()
        self._source, self._name, self._dataset = source, name, dataset
        self._read, self._caches = set[str](), set[Path]()

    def check(self, setting: str) -> None:
        """Refuse files that changed since their hash, and other data sets than the tasks read."""
        source, file = self._source, self._source.file
        hashes = {name: source.fingerprint(name) for name in self._read}
        if (file and source.file_hash not in (None, hashed_config(file, str(file))[1])) or any(
            source.fingerprint(name, anew=True) != old for name, old in hashes.items()
        ):
            for cache in self._caches:  # it may have the documents of another hash
                shutil.rmtree(cache, ignore_errors=True)
            raise UsageError(
                f"{setting}: its files changed while the run began; run the command again"
            )
        if self._dataset is None or not self._read:  # a task in Python may not say what it reads
            return
        if self._read != {part.strip() for part in self._dataset.split("+")}:
            raise UsageError(
                f"task={self._name}: dataset={self._dataset}: it reads "
                f"{' + '.join(sorted(self._read))}; a group reads what the files of its tasks say"
            )

    def _load_full_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config: dict[str, Any] = super()._load_full_config(*args, **kwargs)
        self._check_metrics(config)
        dataset = config.get("dataset_path")
        if not isinstance(dataset, str):
            return config
        if self._dataset is not None and config.get("task") == self._name:
            dataset = config["dataset_path"] = self._dataset
        self._read.add(dataset)
        if (directory := self._source.directory(dataset)) is not None:
            config["dataset_path"] = str(directory)
            fingerprint = self._source.fingerprint(dataset)
        else:
            fingerprint = self._source.file_hash if data_files(config) else None
        if fingerprint is not None:
            # datasets keys its cache by the files' names and times, so two contents could be taken
            # for one another: each gets a cache of its own.
            cache = cache_directory() / "datasets" / fingerprint
            config["dataset_kwargs"] = config.get("dataset_kwargs") or {}
            config["dataset_kwargs"] |= {"cache_dir": str(cache)}
            self._caches.add(cache)
        return config

    def _check_metrics(self, config: Mapping[str, Any]) -> None:
        """Refuse a metric or an aggregation of a user's file that lm-eval does not know."""
        if self._source.file is None or config.get("process_results") is not None:
            return
        for entry in config.get("metric_list") or ():
            of_lm_eval = {"aggregation": AGGREGATION_REGISTRY}
            if not entry.get("hf_evaluate"):
                of_lm_eval["metric"] = METRIC_REGISTRY
            for field, names in of_lm_eval.items():
                if isinstance(name := entry.get(field), str) and name not in names:
                    choice = bad_choice(f"tasks={self._source.file}: {field}", name, names)
                    raise UsageError(f"{choice}; a metric of evaluate needs hf_evaluate: true")
