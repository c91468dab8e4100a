"""Commands that compute some cells in few sweeps, or one cell, and what records say of theirs."""

import functools
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import CELL_FIELDS, MODEL_FIELDS, OMITTED, TASK_FIELDS, Cell
from capmoe_eval.experiment.composition import composed, load_option, options, override, task_word
from capmoe_eval.experiment.datasource import DIRECTORY, HUB, is_embedded
from capmoe_eval.experiment.results import read_results
from capmoe_eval.experiment.settings import TASK_DEFAULTS
from capmoe_eval.routing.capacity import gamma_number
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs

# What a sweep can run over, in the order in which cells are joined: tasks share one evaluation of
# the configuration, and all else is a comma list.
_SWEPT = (
    *("tasks", "seed", "gamma", "budget", "m", "rounds", "modality", "shuffle", "batch_size"),
    *("max_num_batched_tokens", "backend", "method", "model"),
)
Words: TypeAlias = dict[str, tuple[Any, ...]]
"""Keys of the configuration, and the values that each runs over."""


def sweeps(cells: Iterable[Cell], overrides: Sequence[str] = ()) -> list[str]:
    """Return commands that compute exactly these cells: few, since a sweep loads a model once.

    ``overrides`` is the command line of the cells' experiment, such as ``device=cuda:1``; what it
    says of a grid, a part or a profile is left out.
    """
    keys = {_key(word) for word in overrides} - ({*_SWEPT} - {"model"})
    commands: list[Words] = [
        {key: (value,) for key, value in _cell_words(cell, _SWEPT).items() if key not in keys}
        for cell in cells
    ]
    of_cells = set().union(*commands)
    named = [word.partition("=")[2] for word in overrides if _key(word) == "model"]
    kept = [
        word
        for word in overrides
        if not word.lstrip("+~").startswith(("grid", "parts", "profile"))
        and _key(word) not in of_cells
    ]
    for key in _SWEPT:
        commands = _joined(commands, key)
    return [_line(_without_defaults(words, named), kept) for words in commands]


def cell_command(cell: Cell, results: str) -> str | None:
    """Return the shell command that computes one cell, without what its defaults say already.

    ``results`` is the directory of the new record. None if the task is none of ``conf/tasks/``.
    """
    if _task_defaults(cell.task.name) is None:
        return None
    words = _cell_words(cell) | {"results_dir": results}
    return _line({key: (value,) for key, value in words.items()})


def as_evaluated(overrides: Sequence[str]) -> list[str]:
    """Return a command line with the settings that it leaves to the records of its own model.

    With ``model.name=NAME results_dir=DIR`` they are those of its records there, such as
    ``model.pretrained``, ``limit``, ``ep_size`` and the source of documents, whose directory is
    :data:`DIRECTORY`; with a ``model=NAME`` of the suite the source alone. No record tells none.

    Raises:
        UsageError: If the weights are not named, and there is no record that names them.
    """
    words = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    name = words.get("model.name", words.get("model"))
    if name is None or "results_dir" not in words:
        return [*overrides]
    root = Path(words["results_dir"]).expanduser()
    cells = [record.cell for record in read_results(root, [], name)]
    if not cells and "model.pretrained" not in words and words.get("model") == "custom":
        raise UsageError(
            f"model.name={name}: has no record in {root}; name its weights, too: "
            "model.pretrained=PATH_OR_HUB_ID"
        )

    def says_less(cell: Cell) -> tuple[bool, bool]:
        # A task of a user, or with documents of its own, tells nothing of those of other tasks;
        # without a limit a method knows no ranks.
        task = _task_defaults(cell.task.name)
        return task is None or task["data_root"] is not None, cell.method.is_stock

    left_out = {*knobs(), "method", "gamma", "tasks", "shuffle"} - {"ep_size"} | words.keys()
    left_out |= {"data.name"} if "data.root" in words else set()
    settings = _cell_words(min(cells, key=says_less)) if cells else {}
    keys = [key for key in settings if key not in left_out and not key.startswith("tasks.")]
    keys = [key for key in keys if "model.name" in words or key.startswith("data.")]
    return [*overrides, *(override(key, settings[key]) for key in keys)]


def other_sources(cells: Collection[Cell], root: Path) -> str:
    """Return the settings that show records below ``root`` of the same tasks, other documents."""
    tasks = {(cell.model.name, cell.task.name) for cell in cells}
    names = {record.cell.data for task in tasks for record in read_results(root, [], *task)}
    names -= {cell.data for cell in cells}
    words = [[override(*word) for word in _source_words(name).items()] for name in sorted(names)]
    return ", or ".join(map(" ".join, words))


def _cell_words(cell: Cell, always: Collection[str] = ()) -> dict[str, Any]:
    """Return the words that name a cell: what differs from the defaults, or stands ``always``."""
    config, name = _model_defaults(cell.model.name), cell.model.name
    task, prefix = _task_defaults(cell.task.name) or {}, f"tasks.{cell.task.name}."
    words: dict[str, Any] = {"model": name if config["model"]["name"] == name else "custom"}
    words |= _different(config["model"], cell.model, MODEL_FIELDS, "model.")
    words |= _different(config, cell.model, ("dtype", "attention"))
    words |= _method_words(cell.method, config, always) | {"tasks": task_word(cell.task.name)}
    words |= _different(task, cell.task, [field for field in TASK_FIELDS if field in task], prefix)
    batch_size = task.get("batch_size")
    if batch_size and batch_size != cell.batch_size:
        words[f"{prefix}batch_size"] = cell.batch_size
    if "batch_size" in always or (not batch_size and config["batch_size"] != cell.batch_size):
        words["batch_size"] = config["batch_size"] if batch_size else cell.batch_size
    left_out = {"batch_size", "data"}
    if cell.backend == "transformers":
        left_out |= {"max_num_batched_tokens"}
    fields = [field for field in CELL_FIELDS if field not in left_out]
    words |= {name: getattr(cell, name) for name in fields if name in always}
    words |= _different(config, cell, fields)
    if cell.data != (task.get("data_root") or config["data"]["root"] or HUB):
        words |= {f"{prefix}data_root": None} if task.get("data_root") else {}
        words |= _source_words(cell.data)
    return words


def _source_words(name: str) -> dict[str, str | None]:
    if name == HUB or is_embedded(name):
        return {"data.root": None if name == HUB else name}
    return {"data.root": DIRECTORY, "data.name": name}


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


@functools.cache
def _model_defaults(name: str) -> Mapping[str, Any]:
    """Return the configuration of a model without overrides; an unknown model is ``custom``."""
    if name not in options("model"):
        return _model_defaults("custom")
    if name == "custom":
        return _plain(composed(["model=custom", "model.name=?", "model.pretrained=?"]))
    config = composed([])  # as a grid does: composing anew for each model takes long
    config.model = load_option("model", name)
    return _plain(config)


@functools.cache
def _task_defaults(name: str) -> Mapping[str, Any] | None:
    """Return the settings of a task in ``conf/tasks/``, or None if it is not there."""
    settings = _plain(load_option("tasks", name)).get(name) if name in options("tasks") else None
    return None if settings is None else TASK_DEFAULTS | settings


def _plain(config: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config, resolve=True)
    return dict(values)


def _line(words: Words, overrides: Sequence[str] = ()) -> str:
    swept = any(len(values) > 1 for key, values in words.items() if key != "tasks")
    arguments = [override(key, *values) for key, values in words.items()]
    return shlex.join(["capmoe-eval", "sweep" if swept else "run", *overrides, *arguments])


def _method_words(
    method: Method, defaults: Mapping[str, Any], always: Collection[str]
) -> dict[str, Any]:
    """Return a method, its γ, and the knobs that make it another or stand ``always``."""
    settings = method.identity()
    words: dict[str, Any] = {"method": settings.pop("method")}
    if "gamma" in settings:
        gamma = settings.pop("gamma")
        words["gamma"] = gamma if (number := gamma_number(gamma)) is None else number
    for knob in [k for k, v in settings.items() if k not in always and v != defaults[k]]:
        others = settings | {knob: defaults[knob]}
        with suppress(UsageError):  # beside the others it may be impossible
            if create_method(method.name, words.get("gamma"), **others) == method:
                settings = others
    return words | {k: v for k, v in settings.items() if k in always or v != defaults[k]}


def _different(
    defaults: Mapping[str, Any], cell_part: object, fields: Sequence[str], prefix: str = ""
) -> dict[str, Any]:
    values = {name: getattr(cell_part, name) for name in fields}
    return {prefix + name: value for name, value in values.items() if defaults.get(name) != value}


def _joined(commands: Iterable[Words], key: str) -> list[Words]:
    """Join the words that differ in one key alone."""
    groups: dict[str, Words] = {}
    for words in commands:
        rest = sorted((name, None if name == key else values) for name, values in words.items())
        joined = groups.setdefault(repr(rest), dict(words))
        if key in words:
            joined[key] = tuple(dict.fromkeys((*joined[key], *words[key])))
    return list(groups.values())


def _without_defaults(words: Words, models: Sequence[str]) -> Words:
    """Leave out what :func:`sweeps` always says, where each of the models has it by default.

    ``models`` are those of commands whose words name none.
    """
    batches = {_model_defaults(name)["batch_size"] for name in words.get("model", models)}
    quiet: dict[str, set[Any]] = {"modality": {knobs()["modality"].default}, "shuffle": {None}}
    quiet["batch_size"] = batches if len(batches) == 1 else set()
    quiet |= {name: {default} for name, default in OMITTED.items()}
    return {key: values for key, values in words.items() if set(values) != quiet.get(key)}
