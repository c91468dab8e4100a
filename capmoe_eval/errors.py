"""Errors that a user can act on: one line of the field, the value and the fix."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic import ValidationError

DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""The numbers of an OSError that the next file would have as well."""
_SHOWN = 100  # characters of a value
_UNEXPECTED = 400  # characters of a message that nobody expected
_LISTED = 100  # names that a line lists; lm-eval has 14,000 tasks


class UsageError(ValueError):
    """Something the user said cannot be done; the message is one line and names the fix.

    The command line prints it without a traceback and exits with status 2.
    """


class UnwritableError(UsageError):
    """A file cannot be written, so whatever else would be computed would be lost."""


class NoModelError(UsageError):
    """A profile has no model for what is asked."""


class LeftOutWarning(UserWarning):
    """A record cannot be read, and a command goes on without it; it prints the line alone."""


class EnforcementError(RuntimeError):
    """An invariant of the suite was broken; the numbers of the run must not be used."""


def shown(value: object) -> str:
    """Return a value as the user writes it on the command line, short and in one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    if not text.isprintable():
        signs = (s if s.isprintable() else s.encode("unicode_escape").decode() for s in text)
        text = "".join(signs)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its kind where it says nothing.

    Of a ``KeyError`` that is the key, which is said to be missing.
    """
    if isinstance(error, KeyError) and error.args and str(error.args[0]).isidentifier():
        return f"{error.args[0]} is missing"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def kind_and_place(error: Exception) -> str:
    """Return the kind, message and place of an exception that nobody expected, in one line.

    Of a bare assertion the message is the code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())[:_UNEXPECTED] or (frames[-1].line if frames else "")
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def bad_choice(field: str, value: object, choices: Iterable[str]) -> UsageError:
    """Return the error for a name that is none of ``choices``, with the closest one if there is."""
    names = list(choices)
    hint = ""
    if isinstance(value, (list, tuple)):
        values = ",".join(map(str, value))
        hint = f"is a list; evaluate each by capmoe-eval sweep {field}={shown(values)}, or "
    elif close := closest(str(value), names):
        hint = f"did you mean {close!r}? "
    listed = ", ".join(names) if len(names) <= _LISTED else f"{len(names)} names"
    return UsageError(f"{field}={shown(value)}: {hint}choose one of {listed}")


def closest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a mistyped word may mean, or None.

    Each part of the word, such as ``easy`` of ``arc_easy``, must be near a part of the name, and
    its numbers must be the name's: ``fig3`` is not ``fig13``.
    """
    numbers = re.findall(r"\d+", word)
    for name in difflib.get_close_matches(word, list(names), cutoff=cutoff):
        parts = [part for part in re.split(r"[\W_]+", name) if part]
        is_near = all(
            difflib.get_close_matches(part, parts, cutoff=0.5)  # of two letters one may be wrong
            for part in re.split(r"[\W_]+", word)
            if part
        )
        if is_near and numbers in ([], re.findall(r"\d+", name)):
            return name
    return None


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is none of several names, by a UsageError with the closest one."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise bad_choice(field, value, names)


def unwritable(field: str, path: Path, error: OSError) -> UnwritableError:
    """Return the error for a directory or file, named by a setting, that cannot be written."""
    reason = error.strerror or error
    space = "free some space or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return UnwritableError(
        f"{field}={shown(path)}: cannot be written ({reason}); {space}choose another path with "
        f"{field}=PATH"
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
