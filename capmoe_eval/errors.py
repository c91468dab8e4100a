"""Errors that a user can act on: one line that names the field, the value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Something the user said cannot be done; the message is one line and names the fix.

    The command line prints it without a traceback and exits with status 2.
    """


class EnforcementError(RuntimeError):
    """A hard promise of the suite was broken; the numbers of the run must not be used."""


def bad_choice(field: str, value: object, choices: Iterable[str]) -> UsageError:
    """Return the error for a name that is none of ``choices``, with the closest one if there is.

    Args:
        field: The setting, as the user writes it.
        value: What the user wrote.
        choices: The names that would have been right.
    """
    names = list(choices)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"{field}={value}: {hint}choose one of {', '.join(names)}")
