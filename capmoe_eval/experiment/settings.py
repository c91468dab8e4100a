"""The keys of the configuration: each is declared once, with the type that checks its values.

The keys of methods and their knobs are those of the registry, so that a method that a user
registers brings its own. The fields of a model and of a task that identify a cell are declared by
:class:`ModelId` and :class:`TaskId`, so that records are held to the same rules.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from capmoe_eval.beside import check_installed
from capmoe_eval.errors import UsageError, bad_choice, shown
from capmoe_eval.experiment.cell import (
    BERTSCORE,
    CELL_FIELDS,
    MODEL_FIELDS,
    TASK_FIELDS,
    Attention,
    Cell,
    Dtype,
    LocalName,
    ModelId,
    Name,
    Own,
    TaskId,
    Text,
    Threads,
)
from capmoe_eval.experiment.datasource import DIRECTORY
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.routing.capacity import factor_forms, parse_factor
from capmoe_eval.routing.knobs import Count, Seed, check, field_types, says
from capmoe_eval.routing.registry import knobs, method_class


def _method(name: object) -> object:
    method_class(name)
    return name


def _gamma(gamma: object) -> object:
    if isinstance(gamma, (list, tuple)):
        values = shown(",".join(map(str, gamma)))
        raise UsageError(
            f"gamma=[{values}]: must be one capacity factor; evaluate each by capmoe-eval sweep "
            f"gamma={values}, or set layer_gammas=[{values}] for one of each MoE layer"
        )
    if gamma is not None and gamma not in [form.keyword for form in factor_forms()]:
        parse_factor(gamma)
    return gamma


Gamma = Annotated[Any, AfterValidator(_gamma)]
_DEVICE: Final = "(cpu|cuda|mps|xpu|npu)(:[0-9]{1,3})?"
Device = Annotated[
    str,
    Field(pattern=f"^(auto|{_DEVICE})$"),
    says("auto or a device: cpu, cuda, mps, xpu or npu, or one of several, such as cuda:1"),
]
DeviceMap = Annotated[
    str,
    Field(pattern=f"^(auto|balanced(_low_0)?|sequential|{_DEVICE})$"),
    says("auto, balanced, balanced_low_0, sequential or a device such as cuda:1"),
]

_Threads = Threads | Annotated[None, Field(description="null for torch's own choice")]
_NoText = Annotated[None, Field(description="null for none")]
_Hub = Annotated[None, Field(description="null for the hub")]
_OneDevice = Annotated[None, Field(description="null for one device")]
_Configured = Annotated[None, Field(description="null for that of the configuration")]

_OF_MODEL: Final[dict[str, Any]] = {
    "title": Text,
    "note": Text | _NoText,  # a caution about the model's numbers
    "profile": Name,
    "dtype": Dtype,
    "device_map": DeviceMap | _OneDevice,
    "threads": _Threads,
    "gamma": Gamma,
    "batch_size": Count,
    "data_root": Text | _Hub,
}
"""Fields of ``model`` beside those of :class:`ModelId`; most are defaults of keys."""
_OF_TASK: Final[dict[str, Any]] = {
    "title": Text,
    "batch_size": Count | _Configured,
    "data_root": Text | _Configured,
    "file": Text | _NoText,  # of a user's own task
}
"""Fields of a task beside those of :class:`TaskId`."""
_SECTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "data": {
        "root": Text | _Hub,
        "name": LocalName | Annotated[None, Field(description="null for the directory's own")],
    },
    # A profile has lists of models besides.
    "profile": {"name": Name, "seeds": Annotated[list[Seed], Field(examples=["[0,1,2]"])]},
}
_OF_RUN: Final[Mapping[str, Any]] = {
    "method": Annotated[Any, AfterValidator(_method)],
    "gamma": Gamma,
    "dtype": Dtype,
    "attention": Attention | Own,
    "device": Device,
    "device_map": DeviceMap | _OneDevice,
    "threads": _Threads,
    "parallel": Literal["none", "ep"],
    "results_dir": Text,
    "overwrite": bool,
    "plan": bool,
    "allow_code_execution": bool,
    "log_samples": bool,
}
"""The keys beside a method's knobs, a cell's fields and sections."""

GROUPS: Final = ("model", "tasks", "experiment", "profile", "variant")
"""The groups of ``conf/``, of whose options a word ``group=option`` chooses one."""
NAMES: Final = (*_OF_RUN, *CELL_FIELDS, *_SECTIONS, *GROUPS, "grid", "parts")
"""The names of keys, groups and sections; a knob has none of them."""
LISTS: Final = ("tasks", "layer_gammas")
"""The keys whose value may be a list."""
TASK_DEFAULTS: Final = {
    **{"images": False, "batch_size": None, "data_root": None, "file": None, "file_hash": None},
    **BERTSCORE,
}
"""The fields that a task need not have."""


def keys() -> dict[str, Any]:
    """Return the type of each key that is no section."""
    of_cell = field_types(Cell)
    return {
        **_OF_RUN,
        **{name: knob.annotation for name, knob in {**knobs(), **observer_options()}.items()},
        **{name: of_cell[name] for name in CELL_FIELDS if name != "data"},  # which is a section
    }


def fields(section: str) -> dict[str, Any]:
    """Return the types of the fields of a section; of a task for ``tasks``."""
    if section == "model":
        types = _part(ModelId, MODEL_FIELDS) | _OF_MODEL
        return types | {"ep_size": knobs()["ep_size"].annotation}
    if section == "tasks":
        return _part(TaskId, TASK_FIELDS) | _OF_TASK
    return dict(_SECTIONS.get(section, {}))


def check_words(words: Sequence[str]) -> None:
    """Refuse words of a command line that set a key which is not there (UsageError).

    It takes a fifth of the time in which Hydra would say so, and knows which key is meant.
    """
    for word in words:
        if f"={DIRECTORY}/" in word:
            raise UsageError(f"{word}: {DIRECTORY} stands for a directory; write its path")
        if word.startswith("~") and word[1:].partition("=")[0] in keys():
            raise UsageError(f"{word}: a setting cannot be deleted; leave it out")
        # A word with + or ~ is left to Hydra, and what it adds to :func:`check_keys`.
        path = re.match(r"(\w+)(?:\.(\w+))?(?:\.(\w+))?[\w.]*=", word)
        if path is None or path[1] == "hydra":
            continue
        section = fields(path[1])
        if not section and path[1] not in {*keys(), *NAMES}:
            for other in words:  # the key may be a knob of a method that is not there
                if re.fullmatch(r"method=\w+(,\w+)*", other):
                    list(map(method_class, other.removeprefix("method=").split(",")))
            check_installed(path[1])
            raise bad_choice("key", path[1], sorted({*keys(), *NAMES}))
        field = path[3] if path[1] == "tasks" else path[2]
        if section and field and field not in section and path[1] != "profile":
            raise bad_choice(path[1], field, section)


def _part(kind: type, names: Iterable[str]) -> dict[str, Any]:
    types = field_types(kind)
    return {name: types[name] for name in names}


def check_keys(configuration: Mapping[str, object]) -> None:
    """Refuse a value that its key of the configuration cannot have, by a UsageError with the rule.

    A field that is not there is not complained of: what needs it names it.
    """
    types = keys()
    for key, value in configuration.items():
        if key in types:
            check(key, value, types[key])
        elif key == "tasks":
            if not isinstance(value, Mapping) or not value:
                raise UsageError(
                    f"tasks={shown(value)}: must name at least one task, for example tasks=[obqa]"
                )
            for name, task in value.items():
                check("tasks", name, Name)
                _check_section(f"tasks.{name}", task, fields("tasks"))
        elif section := fields(key):
            _check_section(key, value, section)
        elif key != "variant":  # ``+gama=1`` forces it on Hydra
            raise bad_choice("key", key, sorted((*types, *_SECTIONS, "model", "tasks", "variant")))


def _check_section(name: str, section: object, types: Mapping[str, Any]) -> None:
    if not isinstance(section, Mapping) or not section:
        example = f"{name}.{next(iter(types))}"
        raise UsageError(
            f"{name}={shown(section)}: must have at least one field, such as {example}"
        )
    for field in section:
        if field not in types and name != "profile":  # a profile has lists of its own
            raise bad_choice(name, field, types)
    for field, annotation in types.items():
        if field in section:
            check(f"{name}.{field}", section[field], annotation)
