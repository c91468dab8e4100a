"""Make a user's own task file of lm-eval an option of the group ``tasks``: ``tasks=mine.yaml``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import yaml
from hydra.core.config_store import ConfigStore

from capmoe_eval.errors import UsageError, first_line

_FILE: Final = re.compile(r"[^\s,\[\]()=\"']+\.ya?ml(?=[,\])\"']|$)")
_TASKS: Final = re.compile(r"\+{0,2}(grid\.|parts\.\w+\.)?tasks=")
# The first metric that lm-eval reports where a file names none.
_METRICS: Final = {
    "loglikelihood": "perplexity",
    "loglikelihood_rolling": "word_perplexity",
    "multiple_choice": "acc",
    "generate_until": "exact_match",
}
_stored: dict[str, Path] = {}  # the options that files became, by name


class _Loader(yaml.SafeLoader):
    """Loads a file of lm-eval; of ``!function module.name`` it keeps the module's file."""


_Loader.add_constructor(
    "!function", lambda _, node: Path(f"{str(node.value).rpartition('.')[0]}.py")
)


def store_task_files(word: str, options: Callable[[], Collection[str]]) -> str:
    """Return a word of the command line whose task files became options, by their tasks' names.

    A word that sets no tasks, or names no file, stays as it is.

    Args:
        word: For example ``tasks=[obqa,mine.yaml]``; files ``*.yaml`` are relative to the working
            directory.
        options: Returns the tasks of the suite, which a file cannot replace; Hydra is slow to list
            them, so it is called for a file alone.

    Raises:
        UsageError: If a file cannot be read, or declares no task of its own name.
    """
    setting = _TASKS.match(word)
    if setting is None:
        return word
    return setting[0] + _FILE.sub(lambda file: _option(file[0], options), word[setting.end() :])


def _option(text: str, options: Callable[[], Collection[str]]) -> str:
    """Store the option that a file becomes, and return its name."""
    file = Path(text).expanduser().absolute()
    read: dict[Path, bytes] = {}
    config = _config(file, text, read)
    name = config.get("task")
    if not isinstance(name, str):
        raise UsageError(
            f"tasks={text}: declares no task (task: NAME); a group's tasks are named one by one"
        )
    if name in options() and _stored.get(name) != file:
        raise UsageError(f"tasks={text}: {name} is a task of the suite; give it another name")
    metrics, filters = config.get("metric_list") or [{}], config.get("filter_list") or [{}]
    output = config.get("output_type", "generate_until")
    option = {
        "title": config.get("task_alias") or name,
        "lm_eval": name,
        "dataset": config.get("dataset_path") or "none",
        "fewshot": None,
        "metric": metrics[0].get("metric") or _METRICS.get(output, "acc"),
        "filter": filters[0].get("name", "none"),
        "images": "doc_to_image" in config,
        "file": str(file),
        "file_hash": _digest(read),
    }
    ConfigStore.instance().store(name, {name: option}, group="tasks")
    _stored[name] = file
    return name


def _config(file: Path, text: str, read: dict[Path, bytes]) -> dict[str, Any]:
    """Return a file's settings over those that it includes; ``read`` gets every file's bytes."""
    try:
        read[file] = file.read_bytes()
        config: dict[str, Any] = yaml.load(read[file], Loader=_Loader)
        if not isinstance(config, dict):
            raise TypeError("it is no mapping of settings")
        for module in (value for value in config.values() if isinstance(value, Path)):
            read[file.parent / module] = (file.parent / module).read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"tasks={text}: no such file: {error.filename}") from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        why = first_line(error)
        raise UsageError(f"tasks={text}: {file} is no task file of lm-eval ({why})") from error
    above = config.pop("include", [])
    for name in reversed([above] if isinstance(above, str) else above):
        config = _config(file.parent / name, text, read) | config
    return config


def _digest(read: dict[Path, bytes]) -> str:
    parts = sorted(
        path.name.encode() + hashlib.sha256(content).digest() for path, content in read.items()
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
