"""Rules of single values: of the configuration, of cells and of options.

A rule is data: a predicate and the words that follow the field and the value where it is broken.
Nothing is converted: ``no`` is not false, ``true`` is not 1, and 1.0 is not 1.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capmoe_eval.errors import UsageError, bad_choice, shown

_LONGEST_NAME = 100  # bytes; a file system takes 255 for a name, and the suite adds endings


@dataclass(frozen=True)
class Check:
    """What a value must be.

    Attributes:
        rule: What follows ``field=value:``, such as "must be true or false".
        holds: Whether a value keeps the rule.
        choices: The values, where they are names; a wrong one gets a suggestion.
    """

    rule: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()

    def __call__(self, field: str, value: object) -> None:
        """Refuse a value that breaks the rule.

        Raises:
            UsageError: Naming the field, the value and the rule.
        """
        if self.holds(value):
            return
        if self.choices:
            raise bad_choice(field, value, self.choices)
        raise UsageError(f"{field}={shown(value)}: {self.rule}")

    def or_null(self, meaning: str) -> Check:
        """Return the rule that also takes null.

        Args:
            meaning: What null stands for: "null for all".
        """
        holds = self.holds
        return dataclasses.replace(
            self,
            rule=f"{self.rule}, or {meaning}",
            holds=lambda value: value is None or holds(value),
        )


def whole(least: int, most: int | None = None, what: str = "a whole number") -> Check:
    """Return the rule of whole numbers from ``least`` to ``most``."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def holds(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value >= least and (most is None or value <= most)

    return Check(f"must be {what} {bounds}", holds)


def real(*, least: float | None = None, above: float | None = None) -> Check:
    """Return the rule of finite numbers of at least, or above, a bound."""
    bound = f"of at least {least:g}" if least is not None else f"above {above:g}"

    def holds(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return False
        number = float(value)
        inside = number >= least if least is not None else above is None or number > above
        return math.isfinite(number) and inside

    return Check(f"must be a finite number {bound}", holds)


def choice(*names: str) -> Check:
    """Return the rule of one of several names."""
    return Check(
        "must be one of them", lambda value: isinstance(value, str) and value in names, names
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and _is_text(value)
        and value == value.strip()
        and not value.startswith(".")
        and not set(value) & set("/\\")
        and len(value.encode("utf-8", "replace")) <= _LONGEST_NAME
    )


def _is_capacity(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return float(value) >= 0  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


FLAG = Check("must be true or false", lambda value: isinstance(value, bool))
TEXT = Check(
    "must be text in one line; put what looks like a number, true or null into quotes within "
    "quotes, \"'42'\"",
    _is_text,
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
