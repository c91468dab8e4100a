"""Expand a composed configuration to cells, each with its plan: device, documents, directory.

An experiment is the cells of a command line, and the records of those that are finished.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

from capmoe_eval.beside import check_installed
from capmoe_eval.errors import NoModelError, UsageError, bad_choice, check_choice, first_line, shown
from capmoe_eval.experiment.cell import (
    CELL_FIELDS,
    MODEL_FIELDS,
    TASK_FIELDS,
    TINY,
    ZOO,
    Cell,
    ModelId,
    Name,
    TaskId,
    is_of_hub,
)
from capmoe_eval.experiment.composition import composed, load_option, load_options, options
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.observation import CellObserver, chosen_observers
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import read_records, stored
from capmoe_eval.experiment.settings import TASK_DEFAULTS, check_keys
from capmoe_eval.routing.capacity import factor_forms
from capmoe_eval.routing.knobs import LARGEST, check
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import STOCK, create_method, knobs, without_effect

LEFT_OUT = "left out"
"""The beginning of a note on a record that cannot be read."""
_GRIDS = ("grid", "parts")
_OPTIONS = (
    *("device", "device_map", "threads", "parallel"),
    *("overwrite", "allow_code_execution", "log_samples"),
)
_EFFECTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "gamma": ((0.0, math.inf), "layer_gammas stands in its place"),
    "ep_size": ((1, LARGEST), "no capacity and no candidate depends on the ranks"),
    "batch_size": ((1,), "the tasks have their own"),
    "max_num_batched_tokens": ((None,), "it is of backend=vllm"),
}
"""Other values, and the reason where a key has no effect in their place; a knob has a default."""


@dataclass(frozen=True)
class CellPlan:
    """A cell and what is needed to compute it but does not change its result."""

    cell: Cell
    source: DataSource  # of its documents
    root: Path  # the results directory
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:1, …
    # How to spread a large model, as transformers says it (auto, balanced); None for one device.
    device_map: str | None = None
    threads: int | None = None  # CPU threads of torch; None for its own choice
    # none, or ep: over the processes that torchrun started, each with E/R experts and its own
    # sequences of every batch
    parallel: str = "none"
    overwrite: bool = False  # a finished cell is computed again
    allow_code_execution: bool = False  # programs that the model writes may run, in a sandbox
    log_samples: bool = False  # keep prompts, answers and targets in a file beside the record
    observers: tuple[CellObserver, ...] = ()  # of each cell that is computed
    note: str | None = None  # a caution about the model's numbers

    @functools.cached_property
    def path(self) -> Path:
        """The path of the record that a run writes."""
        return self.cell.path(self.root)

    @property
    def samples(self) -> Path | None:
        """The path of the file of prompts, answers and targets; None if they are not kept."""
        return self.path.with_suffix(".samples.jsonl") if self.log_samples else None

    @property
    def stored(self) -> tuple[Path, Path] | None:
        """Path and results directory of the record that is there; None if the cell is missing."""
        return stored(self.root, self.path)


def model_notes(plans: Iterable[CellPlan], title: Callable[[str], str] = str) -> list[str]:
    """Return each caution about the models' numbers once, behind the models' titles.

    A further training seed is left out beside the model that it is of.
    """
    models: dict[str, dict[str, None]] = {}
    for plan in plans:
        if plan.note:
            models.setdefault(plan.note, {})[plan.cell.model.name] = None
    return [
        f"{', '.join(title(n) for n in names if family(n) == n or family(n) not in names)}: {note}."
        for note, names in models.items()
    ]


def profile_name(config: DictConfig) -> str:
    """Return the profile's name, or raise UsageError if it cannot be a directory of reports."""
    name = (config.get("profile") or {}).get("name")
    return str(check("profile.name", name, Name))


def expand_parts(config: DictConfig) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """Return what yields the configuration, plain and resolved, at every point of each part.

    The first key of ``grid`` is the slowest. Each part is expanded together with ``grid``, which
    stands alone where there are none. A ``tasks`` key of a grid chooses among the composed tasks.
    An interpolation sees a point's model and backend, but no other key of the grid. A key that the
    configuration has not, or an empty list, is a UsageError; a part without models has no points.
    """
    parts = grids(config)
    shared = parts.pop("grid")
    ungridded = OmegaConf.masked_copy(config, [str(key) for key in config if key not in _GRIDS])

    @functools.cache  # resolving is slow: once for each model, not at each point
    def resolved(model: str | None, backend: str | None) -> dict[str, Any]:
        ungridded.model = config.model if model is None else load_option("model", model)
        ungridded.backend = backend or config.backend
        try:
            plain: Any = OmegaConf.to_container(ungridded, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            key = error.full_key
            raise UsageError(f"{key}: has no value; set {key}=…") from error
        except InterpolationKeyError as error:
            name, fix = ungridded.model.get("name", model), "defaults: [custom, _self_]"
            line = f"model={name}: {first_line(error)}; begin its file with {fix}"
            raise UsageError(line) from error
        check_keys({key: plain.get(key) for key in ("model", "tasks", "data", *plain)})
        return dict(plain)

    def points(name: str, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        grid = shared | part
        if part.get("model") == []:  # the profile has no model for this part
            return
        _check_grid(config, name, grid)
        load_options("model", grid.get("model", ()))
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            variant = resolved(point.pop("model", None), point.get("backend"))
            if "tasks" in point:
                # The task is named by our key or by lm-eval's.
                tasks, asked = variant["tasks"], point["tasks"]
                chosen = [k for k, task in tasks.items() if asked in (k, task.get("lm_eval"))][:1]
                if not chosen:
                    choice = bad_choice(f"{name}.tasks", asked, tasks)
                    raise UsageError(f"{choice}; tasks= leaves out what this part asks for")
                point["tasks"] = {key: tasks[key] for key in chosen}
            yield variant | point

    return {
        name.removeprefix("parts."): functools.partial(points, name, part)
        for name, part in (parts or {"grid": {}}).items()
    }


def grids(config: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the grids by name, plain: ``grid``, which all share, and each ``parts.<name>``.

    One of them that has no keys with values is a UsageError.
    """
    grid_by_name: dict[str, Any] = {name: config.get(name) for name in _GRIDS}
    for name, value in grid_by_name.items():
        if OmegaConf.is_config(value):
            grid_by_name[name] = OmegaConf.to_container(value, resolve=True)
    if isinstance(grid_by_name["parts"], Mapping):
        grid_by_name |= {f"parts.{name}": grid for name, grid in grid_by_name.pop("parts").items()}
    for name, grid in grid_by_name.items():
        for key in ("model", "tasks"):  # null: those of the configuration
            if isinstance(grid, dict) and grid.get(key, ...) is None:
                del grid[key]
        if not isinstance(grid, Mapping):
            example = "parts.a" if name == "parts" else name
            raise UsageError(
                f"{name}={shown(grid)}: must be keys with lists of values, for example "
                f"{example}.gamma=[1.0,2.0]"
            )
    return grid_by_name


def _check_grid(config: DictConfig, name: str, grid: Mapping[str, Any]) -> None:
    for key, values in grid.items():
        if key not in config or key in (*_GRIDS, "plan"):
            check_installed(key)
            raise bad_choice("key" if name == "grid" else name, key, [str(k) for k in config])
        if key == "model" and values == []:
            raise NoModelError(
                f"profile={profile_name(config)}: has no model for this experiment; choose another "
                f"profile, or models with '{name}.model=[NAME]'"
            )
        if not isinstance(values, list) or not values:
            raise UsageError(
                f"{name}.{key}={shown(values)}: must be a list of values, for example [1.0, 2.0]"
            )
        for value in values:
            if key == "model":
                check_choice(key, value, options(key))
            elif key != "tasks":  # looked up at each point
                check_keys({key: value})


def check_overrides(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse an override, ``key=value``, that would silently do something else than it says.

    That is one that a grid of the configuration would replace; the UsageError says how to change
    the grid instead. It is also one by which a model's name stands for other weights.
    """
    for override, (name, grid) in itertools.product(overrides, grids(config).items()):
        key = re.split("[.=]", override.lstrip("+~"))[0]
        if key in grid and key not in _GRIDS:
            raise UsageError(
                f"{override}: {key} is set by the experiment's grid; change the grid instead: "
                f"'{name}.{key}=[…]'"
            )

    name, pretrained = (config.model.get(field) for field in ("name", "pretrained"))
    if not any(word.lstrip("+").startswith("model.") for word in overrides):
        return
    if not isinstance(pretrained, str) or name == "custom" or name not in options("model"):
        return
    # A path may be the local copy of a model of the hub; a record has the hash of its weights.
    weights = load_option("model", name).pretrained
    of_hub = not weights.startswith((ZOO, TINY)) and not pretrained.startswith((ZOO, TINY))
    if pretrained != weights and (not of_hub or is_of_hub(pretrained)):
        raise UsageError(
            f"model.pretrained={shown(pretrained)}: model={name} names its own weights, {weights}; "
            f"write model=custom model.name=NAME model.pretrained={shown(pretrained)}"
        )


def settings_without_effect(
    words: Sequence[str], points: Sequence[Any], idle: Callable[[CellPlan, str], str | None]
) -> Iterator[str]:
    """Yield a line for each word, ``key=value``, that changes no cell of points of a grid.

    A word that sets the default changes nothing and gets no line, unless no method has the
    knob. A further line names an ``ep_size`` at which a method with a capacity is the baseline.
    ``idle`` returns why a key changes nothing on the model and task of a cell, or None.
    """

    def reasons(key: str, pairs: Iterable[tuple[Any, object]], why: str) -> set[str]:
        """Return why no pair changes a cell; empty where one does."""
        causes: dict[object, str | None] = {}  # a model and a task are asked once
        for point, other in pairs:
            try:
                same = {plan.cell.digest for plan in plans_at([{**point, key: other}])}
            except UsageError:  # the other value cannot be
                same = set()
            for plan in plans_at([point]):
                asked = plan.cell.model, plan.cell.task, plan.source, repr(point[key])
                if plan.cell.digest in same:
                    causes[why] = why
                elif asked not in causes:
                    causes[asked] = idle(plan, key)
                    if causes[asked] is None:
                        return set()
        return {*filter(None, causes.values())}

    methods = [point["method"] for point in points]
    effects = {**{name: ((knob.default,), knob.help) for name, knob in knobs().items()}, **_EFFECTS}
    del effects["layer_gammas"]  # it has an effect, or is refused
    for word in words:
        key = word.partition("=")[0]
        others, why = effects.get(key, ((), ""))
        pairs = [(p, other) for p in points for other in others if p[key] != other]
        if line := without_effect(key, methods):
            if word != "gamma=inf":  # the baseline, as which it computes
                yield f"{word}: {line}"
        elif texts := reasons(key, pairs, why):
            values = ",".join(dict.fromkeys(shown(p[key]) for p, _ in pairs))
            text = ", ".join(sorted(texts - {why})) or why
            yield f"{key}={values}: has no effect on these cells ({text})"
    yield from dict.fromkeys(
        f"ep_size={p['ep_size']}: method={p['method']} gamma={p['gamma']} is the baseline: the "
        "capacity of a device has room for all pairs where gamma is not below ep_size"
        for p in points
        if p["method"] != STOCK
        and _method(p).is_stock
        and not _method({**p, "ep_size": LARGEST}).is_stock
    )


def plans(config: DictConfig) -> list[CellPlan]:
    """Return a composed configuration's plans, one per cell; UsageError for an impossible value."""
    return plans_at(point for points in expand_parts(config).values() for point in points())


def plans_at(points: Iterable[Mapping[str, Any]]) -> list[CellPlan]:
    """Return the plans at some points of :func:`expand_parts`, as :func:`plans` does."""
    plan_by_digest: dict[str, CellPlan] = {}
    for point in points:
        for name in point["tasks"]:
            try:
                plan = _plan(point, name)
            except KeyError as error:
                model = point["model"].get("name")
                raise UsageError(
                    f"model={model}, tasks={name}: field {error} is missing in one of their files; "
                    "conf/model/custom.yaml and conf/tasks/obqa.yaml have all fields"
                ) from error
            plan_by_digest.setdefault(plan.cell.digest, plan)
    return list(plan_by_digest.values())


def planned(overrides: Sequence[str]) -> tuple[DictConfig, list[CellPlan]]:
    """Return the configuration of a command line and its plans, one per cell.

    ``overrides`` are as for ``capmoe-eval run``, for example ``experiment=table2``. A value that
    cannot be is a UsageError, an unknown key a HydraException.
    """
    config = composed(overrides)
    check_overrides(config, overrides)
    return config, plans(config)


def finished(plans: Sequence[CellPlan]) -> tuple[list[Record], list[str]]:
    """Return the records of the plans that are finished, in their order, and notes on all plans.

    These are the cautions about the models' numbers, then a line for each file that cannot be read.
    """
    broken: list[str] = []
    records = read_records((place for plan in plans if (place := plan.stored)), broken)
    return records, [*model_notes(plans), *(f"{LEFT_OUT}: {line}" for line in broken)]


def _method(config: Mapping[str, Any]) -> Method:
    gamma = config["gamma"]
    if config["layer_gammas"] and gamma not in [form.keyword for form in factor_forms()]:
        gamma = None  # it may be the model's
    return create_method(config["method"], gamma, **{knob: config[knob] for knob in knobs()})


def _plan(config: Mapping[str, Any], task_name: str) -> CellPlan:
    model, task = config["model"], TASK_DEFAULTS | config["tasks"][task_name]
    root = task["data_root"] or config["data"]["root"]
    name = None if task["data_root"] else config["data"]["name"]
    file = {"file": Path(task["file"]), "file_hash": task["file_hash"]} if task["file"] else {}
    source = replace(data_source(root, name), **file)
    cell = Cell(
        model=ModelId(
            **{field: model[field] for field in MODEL_FIELDS},
            dtype=config["dtype"],
            attention=config["attention"],
        ),
        method=_method(config),
        task=TaskId(task_name, **{field: task[field] for field in TASK_FIELDS}),
        **{
            **{field: config[field] for field in CELL_FIELDS},
            "batch_size": task["batch_size"] or config["batch_size"],
            "data": source.name,
        },
    )
    return CellPlan(
        cell=cell,
        source=source,
        root=Path(config["results_dir"]).expanduser(),  # where a YAML file has it
        observers=chosen_observers(config),
        note=model["note"],
        **{key: config[key] for key in _OPTIONS},
    )
