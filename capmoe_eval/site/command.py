"""The command line that computes a record's cell again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.cell import Cell
from capmoe_eval.configuration import load_option, options
from capmoe_eval.datasource import EMBEDDED
from capmoe_eval.finished import composed

_MODEL_FIELDS: Final = ("pretrained", "revision", "max_length", "tokenizer")
_TASK_FIELDS: Final = ("lm_eval", "dataset", "metric", "fewshot", "filter")
_CELL_FIELDS: Final = ("limit", "eval_seed", "shuffle")
_CUSTOM: Final = "custom"
_BARE: Final = re.compile(r"[A-Za-z0-9_./-]+(?:[:][A-Za-z0-9_./-]+)*")
_NOT_TEXT: Final = re.compile(
    r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false|null", re.IGNORECASE
)

DIRECTORY: Final = "DIRECTORY"
"""Stands in a command for a directory that a record does not know."""


class Reproduction:
    """Says how cells are computed again; what a model's defaults say already is left out."""

    def __init__(self) -> None:
        self._models = set(options("model")) - {_CUSTOM}
        self._tasks = set(options("tasks"))
        self._defaults: dict[str, Mapping[str, Any]] = {}
        self._settings: dict[str, Mapping[str, Any]] = {}

    def command(self, cell: Cell, results: str) -> str | None:
        """Return one shell command line, or None if the cell's task is none of ``conf/tasks/``.

        Args:
            cell: The cell.
            results: Where the new record should go.
        """
        if cell.task.name not in self._tasks:
            return None
        words = [*self._words(cell), _word("results_dir", results)]
        return f"python -m capmoe_eval {shlex.join(words)}"

    def _words(self, cell: Cell) -> list[str]:
        known = cell.model.name in self._models
        config = self._of_model(cell.model.name if known else _CUSTOM)
        words = [f"model={cell.model.name if known else _CUSTOM}"]
        if not known:
            words.append(_word("model.name", cell.model.name))
        words += _different(config["model"], cell.model, _MODEL_FIELDS, "model.")
        words += _different(config, cell.model, ("dtype", "attention"))
        knobs = cell.method.identity()
        words.append(f"method={knobs.pop('method')}")
        if "gamma" in knobs:
            words.append(f"gamma={float(knobs.pop('gamma'))}")
        words += [_word(knob, value) for knob, value in knobs.items() if config[knob] != value]
        words += self._task_words(cell, config["batch_size"])
        words += _different(config, cell, _CELL_FIELDS)
        if cell.data != (config["data"]["root"] or "hub"):
            words += _data_words(cell.data)
        return words

    def _task_words(self, cell: Cell, batch_size: object) -> list[str]:
        name = cell.task.name
        if name not in self._settings:
            self._settings[name] = _plain(load_option("tasks", name)).get(name) or {}
        settings, prefix = self._settings[name], f"tasks.{name}."
        words = [f"tasks={name}", *_different(settings, cell.task, _TASK_FIELDS, prefix)]
        own = settings.get("batch_size")
        if (own or batch_size) != cell.batch_size:
            words.append(_word(f"{prefix if own else ''}batch_size", cell.batch_size))
        return words

    def _of_model(self, name: str) -> Mapping[str, Any]:
        """Return the composed configuration of a model."""
        if name not in self._defaults:
            if name == _CUSTOM:
                config = composed([f"model={name}", "model.name=?", "model.pretrained=?"])
            else:  # as a grid does: composing anew for each model takes long
                config = composed([])
                config.model = load_option("model", name)
            self._defaults[name] = _plain(config)
        return self._defaults[name]


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _data_words(name: str) -> list[str]:
    if name == "hub":
        return ["data.root=null"]
    if name in EMBEDDED:
        return [f"data.root={name}"]
    return [f"data.root={DIRECTORY}", _word("data.name", name)]


def _different(
    defaults: Mapping[str, Any], wanted: object, fields: Sequence[str], prefix: str = ""
) -> list[str]:
    """Return an override for each field in which something differs from the defaults."""
    return [
        _word(prefix + name, getattr(wanted, name))
        for name in fields
        if defaults.get(name) != getattr(wanted, name)
    ]


def _word(key: str, value: object) -> str:
    """Return an override in Hydra's grammar."""
    if value is None:
        return f"{key}=null"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if not isinstance(value, str):
        return f"{key}={value}"
    if _BARE.fullmatch(value) and not _NOT_TEXT.fullmatch(value):
        return f"{key}={value}"
    # Within quotes Hydra unescapes quotes, and backslashes before them.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{escaped}"'
