"""Check values by the types that declare them, and describe the knobs of methods.

A setting is declared once, as an annotated field of a dataclass::

    m: Annotated[Count, Field(description="candidates of a token", examples=[4])] = 4

pydantic checks its values. The rule in an error, the help, and the table in the documentation are
made from the same declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from capmoe_eval.errors import UsageError, bad_choice, shown

LARGEST: Final = 10**9
"""The largest count that a setting may have; what lies beyond would overflow or never end."""
OMIT_DEFAULT: Final = "omitted from the cell's digest at its default"
"""Marks, in a field's annotation, a knob that is newer than records, whose digests stay."""

Count = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]

_Marker = TypeVar("_Marker")

# Of a whole number, `1.0` and `true` are none; of a number, `inf` and `nan` are none.
_STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False)

_NOUNS: Final = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
}
_BOUNDS: Final = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def says(rule: str) -> Any:
    """Return an annotation with the rule in words, for a type that does not state it."""
    return Field(json_schema_extra={"rule": rule})


def check(field: str, value: object, annotation: Any) -> Any:
    """Return a value of its declared type: for a float, 1 becomes 1.0 and -0.0 becomes 0.0.

    A whole number of another library, such as NumPy, becomes Python's; nothing else is converted. A
    tuple takes a list where its ``Field`` has ``strict=False``.

    Args:
        field: Name of the setting, as the user writes it.
        value: Value of the setting.
        annotation: A type that pydantic knows, such as ``Annotated[int, Field(ge=1)]``.

    Raises:
        UsageError: If the type does not have the value: one line of field, value and rule, or the
            UsageError of a validator.
    """
    if type(value) is not bool and isinstance(value, Integral):
        value = int(value)
    try:
        valid = _adapter(annotation).validate_python(value)
    except ValidationError as error:
        raise _refusal(field, value, annotation, error) from error
    return valid + 0.0 if type(valid) is float else valid


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields that hold plain values, by name.

    An inherited field has the base's annotation, the same object.
    """
    hints = {n: hint for base in reversed(kind.__mro__) for n, hint in _annotations(base).items()}
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    of_objects = {n for n in names if isinstance(hints[n], type) and hints[n] is not Any}
    of_objects -= {n for n in of_objects if hints[n].__module__ == "builtins"}
    return {name: hints[name] for name in names if name not in of_objects}


_annotations = functools.cache(functools.partial(inspect.get_annotations, eval_str=True))


def check_fields(settings: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass's instance, and keep their values as :func:`check` has them.

    ``prefix`` stands before the names in errors, such as ``model.``.
    """
    kind: type = type(settings)
    for name, annotation in field_types(kind).items():
        value = check(f"{prefix}{name}", getattr(settings, name), annotation)
        object.__setattr__(settings, name, value)  # the dataclass is frozen


def rule(annotation: Any, name: str) -> str:
    """Return what a type asks for, such as "must be a whole number of at least 1"."""
    schema = _schema(annotation)
    example = next((f", for example {name}={shown(e)}" for e in schema.get("examples", ())), "")
    return f"must be {_words(schema)}{example}"


@dataclass(frozen=True)
class Knob:
    """A knob of one or several methods, as its field declares it."""

    name: str
    default: Any  # dataclasses.MISSING if it must be set
    annotation: Any

    @property
    def rule(self) -> str:
        """The rule of its values, such as "must be a whole number of at least 1"."""
        return rule(self.annotation, self.name)

    @property
    def values(self) -> str:
        """The values in short, such as "a whole number of at least 1" or "batch or sequence"."""
        return _words(_schema(self.annotation))

    @property
    def help(self) -> str:
        """The description of its field."""
        return str(_schema(self.annotation).get("description", ""))

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that it takes; empty where its values are no names."""
        return _choices(_schema(self.annotation))

    @property
    def omits_default(self) -> bool:
        """True if a cell's digest has it only where it differs from its default."""
        return OMIT_DEFAULT in get_args(self.annotation)[1:]

    def marker(self, kind: type[_Marker]) -> _Marker | None:
        """Return the mark of a class in the annotation; None if there is none."""
        marks = get_args(self.annotation)[1:]
        return next((mark for mark in marks if isinstance(mark, kind)), None)

    def agrees(self, other: Knob) -> bool:
        """Return whether two methods declare a knob alike."""
        mine, others = self.annotation, other.annotation
        return self.default == other.default and (
            mine is others or _schema(mine) == _schema(others)
        )


def declared_knobs(kind: type) -> dict[str, Knob]:
    """Return the knobs that a method's class has, its own and those of its bases."""
    return _declared_knobs(kind)


@functools.cache
def _declared_knobs(kind: Any) -> dict[str, Knob]:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: Knob(name, defaults[name], hint) for name, hint in field_types(kind).items()}


# Each call of `Field` is another key, so that annotations are cached by the object that they are.
@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=_STRICT)


@functools.cache
def _schema(annotation: Any) -> dict[str, Any]:
    return _adapter(annotation).json_schema()


def _refusal(field: str, value: object, annotation: Any, error: ValidationError) -> UsageError:
    problems = error.errors(include_url=False, include_input=False)
    for problem in problems:
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, UsageError):
            return cause
        if cause is not None:
            return UsageError(f"{field}={shown(value)}: {cause}")
    schema = _schema(annotation)
    parts = schema.get("anyOf", [schema])
    nulls = [f", or {_words(part)}" for part in parts if part.get("type") == "null"]
    if sum("enum" in part for part in parts) + len(nulls) == len(parts) and "rule" not in schema:
        return UsageError(f"{bad_choice(field, value, _choices(schema))}{''.join(nulls)}")
    text = rule(annotation, field)
    if any(problem["type"] == "finite_number" for problem in problems):
        text = text.replace("a number", "a finite number", 1)
    if any(problem.get("ctx") == {"le": LARGEST} for problem in problems):
        text += f"; {LARGEST} is the largest"
    return UsageError(f"{field}={shown(value)}: {text}")


def _choices(schema: dict[str, Any]) -> tuple[str, ...]:
    names = schema.get("enum") or [schema[key] for key in ("const",) if key in schema]
    within = [name for part in schema.get("anyOf", ()) for name in _choices(part)]
    return tuple(map(str, (*names, *within)))


def _words(schema: dict[str, Any]) -> str:
    """Return what a JSON schema asks for, as a noun."""
    if "rule" in schema:
        return str(schema["rule"])
    if "anyOf" in schema:
        return ", or ".join(map(_words, schema["anyOf"]))
    if choices := _choices(schema):
        return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    kind = schema.get("type", "")
    if kind == "array":
        items = _words(schema["items"])
        return f"a list, each item of which is {items}" if items else "a list"
    if kind == "null":
        return str(schema.get("description", "null"))
    return _NOUNS.get(kind, "") + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    bounds = {key: schema[key] for key in _BOUNDS if schema.get(key) not in (None, LARGEST)}
    if bounds.keys() == {"minimum", "maximum"}:
        return f" from {bounds['minimum']} to {bounds['maximum']}"
    words = " and ".join(f"{_BOUNDS[key]} {bound}" for key, bound in bounds.items())
    return f" {words}" if words else ""
