"""Read ``conf/``, and expand a composed configuration to cells and their placement."""

from __future__ import annotations

import functools
import itertools
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from capmoe_eval.errors import NoModelError, UsageError, bad_choice, check_choice, shown
from capmoe_eval.experiment.arguments import check_once
from capmoe_eval.experiment.cell import MODEL_FIELDS, TASK_FIELDS, Cell, ModelId, TaskId
from capmoe_eval.experiment.datasource import DataSource, cache_directory, data_source
from capmoe_eval.experiment.knob_help import help_text
from capmoe_eval.experiment.results import stored
from capmoe_eval.experiment.settings import TASK_DEFAULTS, check_key
from capmoe_eval.experiment.values import Name
from capmoe_eval.routing.knobs import check
from capmoe_eval.routing.registry import create_method, knobs

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

# ${capmoe.cache:name}, a directory in the user's cache.
OmegaConf.register_new_resolver("capmoe.cache", lambda name: str(cache_directory() / name))
# ${capmoe.beside:path}, the directory that a path is in.
OmegaConf.register_new_resolver("capmoe.beside", lambda path: str(Path(path).absolute().parent))

# ${capmoe.knobs:}, the help of every method and knob.
OmegaConf.register_new_resolver("capmoe.knobs", help_text)

# The options that were composed, by group and name.
_composed: dict[tuple[str, str], DictConfig] = {}

_GRIDS = ("grid", "parts")
_OPTIONS = ("overwrite", "allow_code_execution", "save_trace", "trace_tokens")
_NO_NAME = re.compile(r"[-+]?[\d.][\d._e]*|null|true|false", re.IGNORECASE)
_OF_HYDRA = tuple(
    f"~hydra/{group}"
    for group in (
        *("help", "hydra_help", "job_logging", "hydra_logging"),
        *("launcher", "sweeper", "env", "output"),
    )
)
# The beginning of a word of the command line that sets a grid or one of its keys.
_IN_A_GRID = re.compile(r"(grid|parts)[.=]")


@dataclass(frozen=True)
class Placement:
    """Device and processes of a model."""

    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:1, …
    # How to spread a large model, as transformers says it (auto, balanced); None for one device.
    device_map: str | None = None
    threads: int | None = None  # CPU threads of torch; None for its own choice
    # none, or ep: over the processes that torchrun started, each with E/R experts and its own
    # sequences of every batch
    parallel: str = "none"


@dataclass(frozen=True)
class Plan:
    """A cell and what is needed to compute it but does not change its result."""

    cell: Cell
    source: DataSource  # of its documents
    root: Path  # the results directory
    placement: Placement = Placement()
    overwrite: bool = False  # a finished cell is computed again
    allow_code_execution: bool = False  # programs that the model writes may run, in a sandbox
    save_trace: str | None = None  # directory for the trace of each cell that is computed
    trace_tokens: int = 100_000  # of a trace, at most, up to the end of a forward
    note: str | None = None  # a caution about the model's numbers

    @functools.cached_property
    def path(self) -> Path:
        """The path of the record that a run writes."""
        return self.cell.path(self.root)

    @property
    def stored(self) -> tuple[Path, Path] | None:
        """Path and results directory of the record that is there; None if the cell is missing."""
        return stored(self.root, self.path)


def model_notes(planned: Iterable[Plan], title: Callable[[str], str] = str) -> list[str]:
    """Return each caution about the models' numbers once, behind the models' titles."""
    models: dict[str, dict[str, None]] = {}
    for plan in planned:
        if plan.note:
            models.setdefault(plan.note, {})[title(plan.cell.model.name)] = None
    return [f"{', '.join(names)}: {note}." for note, names in models.items()]


def config_directory() -> Path:
    """Return ``conf/``: beside the package in a checkout, inside it where it is installed."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def for_hydra(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, new keys of grids forced on Hydra, which refuses them.

    They are checked on expansion. A model that is chosen takes the place of those of an
    experiment's grid. A number, null, true or false in place of a group's option is a UsageError,
    and so is a key with two values.
    """
    check_once(words)
    for word in words:
        group, _, option = word.partition("=")
        if _NO_NAME.fullmatch(option) and options(group):
            raise bad_choice(group, option, options(group))
    keys = {word.lstrip("+").partition("=")[0] for word in words}
    one_model = {"experiment", "model"} <= keys and not keys & {"grid", "grid.model"}
    forced = [f"++{word}" if _IN_A_GRID.match(word) else word for word in words]
    return [*forced, "++grid.model=null"] if one_model else forced


def profile_name(config: DictConfig) -> str:
    """Return the profile's name, or raise UsageError if it cannot be a directory of reports."""
    name = (config.get("profile") or {}).get("name")
    return str(check("profile.name", name, Name))


def options(group: str) -> list[str]:
    """Return the names of a configuration group, such as the models."""
    return sorted(path.stem for path in (config_directory() / group).glob("*.yaml"))


def load_option(group: str, name: str) -> DictConfig:
    """Return one option of a group, composed, or raise UsageError if there is none."""
    check_choice(group, name, options(group))
    load_options(group, [name])
    return _composed[group, name].copy()


def load_options(group: str, names: Iterable[str]) -> None:
    """Compose some options of a group, and keep them: all at once takes half as long as singly."""
    new = [name for name in dict.fromkeys(names) if (group, name) not in _composed]
    if new:
        composed = compose_words([f"+{group}@_{n}={name}" for n, name in enumerate(new)], None)
        OmegaConf.set_struct(composed, False)
        _composed.update({(group, name): composed[f"_{n}"] for n, name in enumerate(new)})


@contextmanager
def composing() -> Iterator[None]:
    """Have Hydra's ``compose`` read ``conf/``, also inside a job that Hydra runs."""
    running = GlobalHydra.instance().hydra
    try:
        GlobalHydra.instance().hydra = _hydra(config_directory(), store_knobs())
        yield
    finally:
        GlobalHydra.instance().hydra = running


def store_knobs() -> tuple[str, ...]:
    """Store the knobs of all methods and their defaults as Hydra's ``knobs``; return their names.

    ``conf/config.yaml`` begins with them, so that a method that a user registers brings its own.
    """
    defaults = {name: knob.default for name, knob in knobs().items()}
    ConfigStore.instance().store("knobs", defaults)
    return tuple(defaults)


@functools.cache
def _hydra(directory: Path, _knobs: tuple[str, ...]) -> Hydra | None:
    """Return a Hydra that parses a file of a directory once; by itself, it does at each compose."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base="1.3"):
        found = GlobalHydra.instance().hydra
    loader: Any = found and found.config_loader
    load = loader.repository.load_config
    parsed = functools.cache(lambda config_path: pickle.dumps(load(config_path)))
    # A copy, by pickle as deepcopy takes six times as long: what is composed is made of the nodes.
    loader.repository.load_config = lambda config_path: pickle.loads(parsed(config_path))
    return found


def compose_words(words: Sequence[str], config: str | None = "config") -> DictConfig:
    """Return what Hydra composes of a file of ``conf/``, or of none, and the words of a command.

    What Hydra needs for its own command line is left out, which takes a third of the time, unless
    the words speak of it.
    """
    speaks = any(word.lstrip("+~").startswith("hydra") for word in words)
    with composing():
        composed: DictConfig = compose(config, [*(() if speaks else _OF_HYDRA), *words])
    return composed


def expand_parts(config: DictConfig) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """Return what yields the configuration, plain and resolved, at every point of each part.

    The first key of ``grid`` is the slowest. Each part is expanded together with ``grid``, which
    stands alone where there are none. A ``tasks`` key of a grid chooses among the composed tasks.
    An interpolation sees a point's model, but no other key of the grid. A key that the
    configuration has not, or an empty list, is a UsageError; a part without models has no points.
    """
    parts = grids(config)
    shared = parts.pop("grid")
    ungridded = OmegaConf.masked_copy(config, [str(key) for key in config if key not in _GRIDS])

    @functools.cache  # resolving is slow: once for each model, not at each point
    def resolved(model: str | None) -> dict[str, Any]:
        ungridded.model = config.model if model is None else load_option("model", model)
        return _resolved(ungridded)

    def points(name: str, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        grid = shared | part
        if part.get("model") == []:  # the profile has no model for this part
            return
        _check_grid(config, name, grid)
        load_options("model", grid.get("model", ()))
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            variant = resolved(point.pop("model", None))
            if "tasks" in point:
                point["tasks"] = _chosen_task(variant["tasks"], point["tasks"], name)
            yield variant | point

    return {
        name.removeprefix("parts."): functools.partial(points, name, part)
        for name, part in (parts or {"grid": {}}).items()
    }


def grids(config: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the grids by name, plain: ``grid``, which all share, and each ``parts.<name>``.

    One of them that has no keys with values is a UsageError.
    """
    found: dict[str, Any] = {name: config.get(name) for name in _GRIDS}
    for name, value in found.items():
        if OmegaConf.is_config(value):
            found[name] = OmegaConf.to_container(value, resolve=True)
    if isinstance(found["parts"], Mapping):
        found |= {f"parts.{name}": grid for name, grid in found.pop("parts").items()}
    for name, grid in found.items():
        if isinstance(grid, dict) and grid.get("model", ...) is None:  # of :func:`for_hydra`
            del grid["model"]
        if not isinstance(grid, Mapping):
            example = "parts.a" if name == "parts" else name
            raise UsageError(
                f"{name}={shown(grid)}: must be keys with lists of values, for example "
                f"{example}.gamma=[1.0,2.0]"
            )
    return found


def _check_grid(config: DictConfig, name: str, grid: Mapping[str, Any]) -> None:
    for key, values in grid.items():
        if key not in config or key in (*_GRIDS, "shard", "plan"):
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
                check_key(key, value)


def _chosen_task(tasks: Mapping[str, Any], name: object, grid: str) -> dict[str, Any]:
    """Return the one of the tasks that a grid names, by our key or lm-eval's."""
    for key, task in tasks.items():
        if name in (key, task.get("lm_eval")):
            return {key: task}
    raise bad_choice(f"{grid}.tasks", name, tasks)


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain values, checked."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise UsageError(f"Missing mandatory value: {key}; say {key}=…") from error
    for key in dict.fromkeys(("model", "tasks", "data", *plain)):
        check_key(key, plain.get(key))
    return dict(plain)


def check_overrides(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse an override, ``key=value``, that a grid of the configuration would silently replace.

    The UsageError says how to change the grid instead.
    """
    for override, (name, grid) in itertools.product(overrides, grids(config).items()):
        key = re.split("[.=]", override.lstrip("+~"))[0]
        if key in grid and key not in _GRIDS:
            raise UsageError(
                f"{override}: {key} is set by the experiment's grid; change the grid instead: "
                f"'{name}.{key}=[…]'"
            )


def plans(config: DictConfig) -> list[Plan]:
    """Return a composed configuration's plans, one per cell; UsageError for an impossible value."""
    return plans_at(point for points in expand_parts(config).values() for point in points())


def plans_at(points: Iterable[Mapping[str, Any]]) -> list[Plan]:
    """Return the plans at some points of :func:`expand_parts`, as :func:`plans` does."""
    found: dict[str, Plan] = {}
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
            found.setdefault(plan.cell.digest, plan)
    return list(found.values())


def share(planned: Sequence[Plan], shard: str | None) -> list[Plan]:
    """Return the plans of one of several processes, dealt out in the order of their digests.

    ``shard`` is ``i/n`` for the i-th of n processes, from 1, or None for all plans; anything else
    is a UsageError.
    """
    check_key("shard", shard)
    if shard is None:
        return list(planned)
    number, _, count = shard.partition("/")
    mine = set(sorted(plan.cell.digest for plan in planned)[int(number) - 1 :: int(count)])
    return [plan for plan in planned if plan.cell.digest in mine]


def _plan(config: Mapping[str, Any], task_name: str) -> Plan:
    model, task = config["model"], TASK_DEFAULTS | config["tasks"][task_name]
    source = data_source(task["data_root"] or config["data"]["root"], config["data"]["name"])
    cell = Cell(
        model=ModelId(
            **{field: model[field] for field in MODEL_FIELDS},
            dtype=config["dtype"],
            attention=config["attention"],
        ),
        method=create_method(
            config["method"], config["gamma"], **{knob: config[knob] for knob in knobs()}
        ),
        task=TaskId(task_name, **{field: task[field] for field in TASK_FIELDS}),
        batch_size=task["batch_size"] or config["batch_size"],
        limit=config["limit"],
        data=source.name,
        eval_seed=config["eval_seed"],
        shuffle=config["shuffle"],
    )
    return Plan(
        cell=cell,
        source=source,
        root=Path(config["results_dir"]),
        note=model["note"],
        placement=Placement(**{field.name: config[field.name] for field in fields(Placement)}),
        **{key: config[key] for key in _OPTIONS},
    )
