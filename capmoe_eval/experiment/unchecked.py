"""Stand in for pydantic on a machine that has torch and transformers alone.

Values are taken as they are: nothing is checked here. What is written is what pydantic would write,
so that a file from such a machine is checked where it is read. Only what the benchmarks use is
here; :mod:`capmoe_eval.experiment.checked` says which of the two a process has.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

ConfigDict = dict
ValidationInfo = Any
from_json = json.loads


class ValidationError(ValueError):
    """Is never raised."""


class _Noted:
    """An annotation or a decorator of pydantic's, of which at most the function is used."""

    def __init__(self, func: Any = None, **_rules: Any) -> None:
        self.func = func


class BeforeValidator(_Noted):
    """A function that makes a value from what a file has."""


AfterValidator = PlainSerializer = _Noted


def Field(default: Any = None, **_rules: Any) -> Any:
    """Return the default of a field."""
    return default


def field_validator(*_fields: str, **_rules: Any) -> Callable[[_T], _T]:
    """Return a decorator that leaves a rule unused."""
    return lambda rule: rule


model_validator = field_validator


class BaseModel:
    """The fields that were given, and the defaults of the class for others."""

    def __init__(self, **given: Any) -> None:
        self._given = given
        vars(self).update(given)

    def model_dump(self, **_how: Any) -> dict[str, Any]:
        """Return the given fields in the order of the class, JSON-ready."""
        kinds = (vars(kind).get("__annotations__", {}) for kind in reversed(type(self).__mro__))
        # A field whose name the class has taken, `schema_`, is given without the underscore.
        order = [name.rstrip("_") for fields in kinds for name in fields]
        names = dict.fromkeys((*order, *self._given))
        return {name: _plain(self._given[name]) for name in names if name in self._given}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value):
        return {part.name: _plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


class TypeAdapter(Generic[_T]):
    """Makes dataclasses, and collections of them, from the content of a file."""

    def __init__(self, kind: Any, **_rules: Any) -> None:
        self._kind = kind

    def validate_python(self, content: Any) -> Any:
        """Return the content as the type."""
        return _typed(self._kind, content)


def _typed(kind: Any, value: Any) -> Any:
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        for note in of[1:]:
            value = note.func(value) if isinstance(note, BeforeValidator) else value
        return _typed(of[0], value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{name: _typed(hints[name], part) for name, part in value.items()})
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _typed(of[0], value)
    if origin in (dict, collections.abc.Mapping):
        return {key: _typed(of[1], part) for key, part in value.items()}
    if origin is tuple and of[-1] is not Ellipsis:
        return tuple(_typed(part, each) for part, each in zip(of, value, strict=True))
    if origin in (tuple, list, collections.abc.Sequence):
        parts = [_typed(of[0], part) for part in value]
        return parts if origin is list else tuple(parts)
    return value
