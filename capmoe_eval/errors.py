"""Errors that a user can act on, and the rules of single values that raise them.

An error is one line of the field, the value and the fix. Rules convert nothing: ``no`` is not
false, ``true`` is not 1, and 1.0 is not 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

LARGEST = 10**9
"""The largest count that a setting may have; what lies beyond would overflow or never end."""
_SHOWN = 100  # characters of a value
_LISTED = 100  # names that a line lists; lm-eval has 14,000 tasks
_LONGEST_NAME = 100  # bytes; a file system takes 255 for a name, and the suite adds endings


class UsageError(ValueError):
    """Something the user said cannot be done; the message is one line and names the fix.

    The command line prints it without a traceback and exits with status 2.
    """


class UnwritableError(UsageError):
    """A file cannot be written, so whatever else would be computed would be lost."""


class NoModelError(UsageError):
    """A profile has no model for what is asked."""


class EnforcementError(RuntimeError):
    """A hard promise of the suite was broken; the numbers of the run must not be used."""


def shown(value: object) -> str:
    """Return a value as the user writes it on the command line, short and in one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    if not text.isprintable():
        signs = (s if s.isprintable() else s.encode("unicode_escape").decode() for s in text)
        text = "".join(signs)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its kind where it says nothing.

    Of a ``KeyError`` that is the key, which is said to be missing.
    """
    if isinstance(error, KeyError) and error.args and str(error.args[0]).isidentifier():
        return f"{error.args[0]} is missing"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def bad_choice(field: str, value: object, choices: Iterable[str]) -> UsageError:
    """Return the error for a name that is none of ``choices``, with the closest one if there is."""
    names = list(choices)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(names) if len(names) <= _LISTED else f"{len(names)} names"
    return UsageError(f"{field}={shown(value)}: {hint}choose one of {listed}")


def unwritable(field: str, path: Path, error: OSError) -> UnwritableError:
    """Return the error for a directory or file, named by a setting, that cannot be written."""
    reason = error.strerror or error
    return UnwritableError(
        f"{field}={shown(path)}: cannot be written ({reason}); make room or choose another place "
        f"with {field}=PATH"
    )


@contextmanager
def writing(field: str, path: Path) -> Iterator[None]:
    """Write files in this block; a failure of the disk becomes an UnwritableError of one line."""
    try:
        yield
    except BrokenPipeError:  # the reader of an output has read enough
        raise
    except OSError as error:
        raise unwritable(field, path, error) from error


@contextmanager
def reading(path: Path, wrong: str, fix: str) -> Iterator[None]:
    """Read a file in this block; what is wrong with it becomes a UsageError of one line.

    It has the path, ``wrong``, the reason and the fix; that of a UsageError its words in place.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (EnforcementError, BrokenPipeError):
        raise
    except Exception as error:  # damaged bytes make a library raise any kind
        raise UsageError(f"{path}: {wrong} ({first_line(error)}); {fix}") from error


def field_problem(error: ValidationError, within: str = "") -> str:
    """Return what is wrong with a file that a schema refuses, in one line that names one field.

    ``within`` is the part of the file that was validated.
    """
    first = error.errors(include_url=False)[0]
    places = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    place = (within + "".join(places)).removeprefix(".")
    field = f"field '{place}'" if place else "the file"
    if first["type"] == "missing":
        return f"{field} is missing"
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    value = first["input"]
    return f"{field}: {message}" + (
        "" if isinstance(value, (dict, list)) else f", not {str(value)[:40]!r}"
    )


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


PLAIN = re.compile(r"[!-^`-~]*")
"""The text of a number, without what Python reads beside: 1_0, spaces, digits of other scripts."""


def _is_capacity(value: object) -> bool:
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return False
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
