"""Rules of single values: of the configuration, of cells and of options.

Nothing is converted: ``no`` is not false, ``true`` is not 1, and 1.0 is not 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capmoe_eval.errors import UsageError, bad_choice, shown

_LONGEST_NAME = 100  # bytes; a file system takes 255 for a name, and the suite adds endings


@dataclass(frozen=True)
class Check:
    """A rule of values."""

    rule: str  # in words, which follow ``field=value:``, such as "must be true or false"
    holds: Callable[[Any], bool]  # whether a value keeps it
    choices: tuple[str, ...] = ()  # the values, where they are names; a wrong one gets a suggestion

    def __call__(self, field: str, value: object) -> None:
        """Refuse a value that breaks the rule by a UsageError of field, value and rule."""
        if self.holds(value):
            return
        if self.choices:
            raise bad_choice(field, value, self.choices)
        raise UsageError(f"{field}={shown(value)}: {self.rule}")

    def or_null(self, meaning: str) -> Check:
        """Return the rule that also takes null, with its meaning, such as "null for all"."""
        return Check(
            f"{self.rule}, or {meaning}",
            lambda value: value is None or self.holds(value),
            self.choices,
        )


def whole(least: int, most: int | None = None, what: str = "a whole number") -> Check:
    """Return the rule of whole numbers from ``least`` to ``most``."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and value >= least and (most is None or value <= most)

    return Check(f"must be {what} {bounds}", holds)


def choice(*names: str) -> Check:
    """Return the rule of one of several names."""
    return Check(
        "must be one of them", lambda value: isinstance(value, str) and value in names, names
    )


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and bool(value)
        and value.isprintable()
        and value == value.strip()
        and not value.startswith(".")
        and not set(value) & set("/\\")
        and len(value.encode("utf-8", "replace")) <= _LONGEST_NAME
    )


def _is_capacity(value: object) -> bool:
    try:
        return not isinstance(value, bool) and float(value) >= 0  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


SHARE = Check("must be a share of the experts, above 0 and at most 1, for example 0.5", _is_share)
FLAG = Check("must be true or false", lambda value: isinstance(value, bool))
TEXT = Check(
    "must be text in one line; put what looks like a number, true or null into quotes within "
    "quotes, \"'42'\"",
    lambda value: isinstance(value, str) and bool(value.strip()) and value.isprintable(),
)
NAME = Check(
    "becomes a name in a path, so it must be text without / or \\, without a leading dot, of at "
    f"most {_LONGEST_NAME} bytes; for example my_name",
    _is_name,
)
"""Every name that becomes part of a path."""
CAPACITY = Check(
    "the capacity factor must be a number of at least 0 (0 silences every routed expert, inf means "
    "no capacity), for example gamma=1.0",
    _is_capacity,
)
