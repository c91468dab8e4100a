"""Register methods by name, find them, and make one from a name and its knobs.

All methods are imported when a name is first asked for: the modules of
:mod:`capmoe_eval.routing.methods`, and the entry points of the group :data:`ENTRY_POINTS`. None of
ours imports torch at its top.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from typing_extensions import dataclass_transform

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import UsageError, bad_choice, shown
from capmoe_eval.routing.capacity import factor_forms, parse_factor
from capmoe_eval.routing.knobs import Knob, check, declared_knobs

if TYPE_CHECKING:
    from capmoe_eval.routing.method import Method

ENTRY_POINTS: Final = "capmoe_eval.methods"
"""The group of entry points, each a module that registers methods."""
STOCK: Final = "baseline"
"""The method that changes nothing."""
TOKEN_DROP: Final = "score"
"""Token Drop, which other methods are where their additions have no effect."""
CONTIGUOUS: Final = "contiguous"
"""The placement in which rank r holds the experts r·E/R, r·E/R + 1, …"""

METHODS: dict[str, type[Method]] = {}
"""The registered classes by name; see :func:`method_class`."""
_PLACEMENTS: dict[str, str | None] = {CONTIGUOUS: None}
_CALIBRATIONS: dict[str, str] = {}
_Class = TypeVar("_Class", bound="type[Method]")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def register(method: _Class) -> _Class:
    """Register a class of methods by its ``name``; use it as a decorator.

    The class becomes a frozen dataclass with keyword-only fields, if it is none yet.

    Raises:
        ValueError: If another class has the name, or the class has none.
    """
    if "__dataclass_fields__" not in vars(method):
        dataclasses.dataclass(frozen=True, kw_only=True)(method)
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{method.__qualname__}: name={name!r} must be a name such as 'my_method'")
    other = METHODS.get(name, method)
    if (other.__module__, other.__qualname__) != (method.__module__, method.__qualname__):
        raise ValueError(
            f"{method.__qualname__}: {other.__qualname__} has the name {name!r} already"
        )
    METHODS[name] = method
    knobs.cache_clear()
    return method


def register_placement(name: str, calibration: str) -> None:
    """Register a placement of experts on ranks by its name and the calibration that it needs."""
    _PLACEMENTS[name] = calibration


def register_calibration(kind: str, path: str) -> None:
    """Register a kind of calibration by its name and the path of its class, ``module:Class``."""
    _CALIBRATIONS[kind] = path


@functools.cache
def _import_all() -> None:
    """Import every module that registers a method."""
    core = importlib.import_module("capmoe_eval.routing.methods")  # which imports this module
    for part in pkgutil.iter_modules(core.__path__, f"{core.__name__}."):
        importlib.import_module(part.name)
    load_entry_points(ENTRY_POINTS)


def method_names() -> tuple[str, ...]:
    """Return every name that ``method=`` accepts, in the order of the tables."""
    _import_all()
    return tuple(sorted(METHODS, key=lambda name: METHODS[name].row))


def method_class(name: object) -> type[Method]:
    """Return the class of a method by its name.

    Raises:
        UsageError: If no method has the name.
    """
    names = method_names()
    if not isinstance(name, str) or name not in names:
        for other in names:
            title = METHODS[other].title
            if str(name).lower().replace("_", " ") == title.lower():
                raise UsageError(f"method={shown(name)}: {title} is method={other}")
        check_installed(f"method={name}")
        mistake = bad_choice("method", name, names)
        raise UsageError(f"{mistake}; a method of your own needs its package installed")
    return METHODS[name]


def method_title(name: str) -> str:
    """Return a method's printed name, or the name itself where no method has it."""
    return METHODS[name].title if name in method_names() else name


def placements() -> Mapping[str, str | None]:
    """Return the calibration that each placement of experts needs, by the placement's name."""
    _import_all()
    return _PLACEMENTS


def calibrations() -> Mapping[str, str]:
    """Return the path of the class of each kind of calibration, by the kind's name."""
    _import_all()
    return _CALIBRATIONS


@functools.cache
def knobs() -> Mapping[str, Knob]:
    """Return every knob of every method beside gamma, by its name.

    Raises:
        UsageError: If two methods declare one name differently.
    """
    methods = [METHODS[name] for name in method_names()]
    declared = {name: knob for form in factor_forms() for name, knob in form.knobs.items()}
    for method in methods:
        for name, knob in declared_knobs(method).items():
            if name != "gamma" and not declared.setdefault(name, knob).agrees(knob):
                raise UsageError(
                    f"{name}: {method.__module__}.{method.__qualname__} declares this knob in "
                    "another way than another method; give it another name"
                )
    return declared


def methods_with(knob: str) -> tuple[str, ...]:
    """Return the methods that have a knob; every method with a γ has the knobs of its forms."""
    field = "gamma" if any(knob in form.knobs for form in factor_forms()) else knob
    return tuple(name for name in method_names() if field in declared_knobs(method_class(name)))


def methods_in_words(knob: str) -> str:
    """Return the methods with a knob as a list in words, or as "all but …" if that is shorter."""
    having = methods_with(knob)
    lacking = [name for name in method_names() if name not in having]
    return f"all but {', '.join(lacking)}" if len(lacking) < len(having) else ", ".join(having)


def without_effect(knob: str, methods: Iterable[str]) -> str | None:
    """Return in words why a knob has no effect on the named methods; None if it has one."""
    names = dict.fromkeys(methods)
    if knob not in ("gamma", *knobs()) or names.keys() & {*methods_with(knob)}:
        return None
    return f"has no effect on {', '.join(names)}; it is a knob of {methods_in_words(knob)}"


def create_method(name: str, gamma: object = None, **settings: Any) -> Method:
    """Return the method with a name and knobs, in its canonical form.

    Knobs of other methods are checked and have no effect, so that one configuration serves a sweep
    over methods.

    Args:
        name: One of :func:`method_names`.
        gamma: Capacity factor γ: a number, one for each MoE layer, or the keyword of a form;
            a number is neither checked nor used where the method has no capacity.
        **settings: Knobs by their names.

    Raises:
        UsageError: For an unknown name or knob, or an invalid value.
    """
    method, declared = method_class(name), knobs()
    values = {}
    for knob, value in settings.items():
        if knob not in declared:
            check_installed(knob)
            raise bad_choice("knob", knob, sorted({*declared, "gamma"}))
        values[knob] = check(knob, value, declared[knob].annotation)
    method.check_settings(values)
    method_knobs = declared_knobs(method)
    fields = {knob: value for knob, value in values.items() if knob in method_knobs}
    if "gamma" in method_knobs:
        fields["gamma"] = parse_factor(gamma, values)
    for form in () if "gamma" in fields else factor_forms():  # a number is without effect
        keyword = gamma if gamma == form.keyword is not None else None
        for knob, value in (("gamma", keyword), (form.selector, values.get(form.selector))):
            if value is not None:
                raise UsageError(
                    f"{knob}={shown(value)}: method {name!r} has no capacity factor; leave {knob} "
                    "out, or choose another method"
                )
    return method(**fields).canonical()
