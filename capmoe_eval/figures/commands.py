"""The command lines that measure what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any, Final

from capmoe_eval.cell import Cell
from capmoe_eval.configuration import load_option
from capmoe_eval.method import DEFAULTS

_COMMAND: Final = "python -m capmoe_eval"
# What a sweep can run over, in the order in which cells are joined: tasks share one evaluation of
# the configuration, and all else is a comma list.
_SWEPT: Final = (
    "tasks",
    "seed",
    "gamma",
    "m",
    "rounds",
    "shuffle",
    "batch_size",
    "method",
    "model",
)

Words = dict[str, tuple[Any, ...]]
"""Keys of the configuration and the values that each runs over."""


def commands(cells: Iterable[Cell], overrides: Sequence[str] = ()) -> list[str]:
    """Return commands that compute exactly these cells: few, since a sweep loads a model once.

    Args:
        cells: What is missing.
        overrides: What was said on the command line of the figure, such as ``limit=100``.
    """
    kept = [word for word in overrides if not _is_of_the_experiment(word)]
    said = {word.lstrip("+").partition("=")[0] for word in kept}
    found = [_words(cell, said) for cell in cells]
    for key in _SWEPT:
        found = _joined(found, key)
    return [_line(kept, words) for words in found]


def _is_of_the_experiment(word: str) -> bool:
    """Whether an override only makes sense beside the experiment's grids."""
    return word.lstrip("+~").startswith(("grid", "parts", "profile"))


def _words(cell: Cell, said: set[str]) -> Words:
    """Return what sets a cell: what may be swept, and what is not as usual."""
    model, method = load_option("model", cell.model.name), cell.method
    usual = DEFAULTS | {"ep_size": model.ep_size}
    words: dict[str, Any] = {"model": cell.model.name, "method": method.name}
    words |= {
        knob: value
        for knob, value in method.identity().items()
        if knob in _SWEPT or value != usual.get(knob)
    }
    words |= {"batch_size": cell.batch_size, "shuffle": cell.shuffle, "tasks": cell.task.name}
    return {key: (value,) for key, value in words.items() if key not in said}


def _joined(found: Iterable[Words], key: str) -> list[Words]:
    """Join those that differ in one key alone."""
    groups: dict[Any, Words] = {}
    for words in found:
        rest = tuple(sorted((name, values) for name, values in words.items() if name != key))
        identity = (key in words, repr(rest))
        if identity not in groups:
            groups[identity] = dict(words)
        elif key in words:
            more = [value for value in words[key] if value not in groups[identity][key]]
            groups[identity][key] = (*groups[identity][key], *more)
    return list(groups.values())


def _line(overrides: Sequence[str], words: Words) -> str:
    usual_batch = {load_option("model", name).batch_size for name in words["model"]}
    quiet = {"shuffle": {None}, "batch_size": usual_batch if len(usual_batch) == 1 else set()}
    line = list(overrides)
    for key, values in words.items():
        if key in ("method", "tasks") or set(values) != quiet.get(key):
            # Hydra reads a bare comma as a sweep, so several tasks are a list in brackets.
            listed = key == "tasks" and len(values) > 1
            text = ",".join(map(_spelled, values))
            line.append(f"{key}=[{text}]" if listed else f"{key}={text}")
    if any(len(values) > 1 for key, values in words.items() if key != "tasks"):
        line.insert(0, "-m")
    return f"{_COMMAND} {shlex.join(line)}"


def _spelled(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
