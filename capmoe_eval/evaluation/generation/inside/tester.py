"""Check a model's function inside a sandbox of its own, by calls through pipes.

``/given`` has the problem's prompt, its test and the function's name. The exit status is the
verdict.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

PASSED, WRONG, RAISED, ENDED, UNREADABLE = 0, 10, 11, 12, 13
_LONGEST = 2**24  # characters of an answer


class RaisedError(Exception):
    """The function raised an exception."""


class EndedError(Exception):
    """The program ended, or what it says cannot be read."""


def main() -> None:
    """Check, and exit with the verdict."""
    calls, answers = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a test prints is no call
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    given = json.loads(Path("/given").read_text(encoding="utf-8"))

    def answer() -> Any:
        try:
            returned, value = ast.literal_eval(answers.readline(_LONGEST))
        except (OSError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise EndedError from error
        if returned is not True:
            raise RaisedError(value)
        return value

    def candidate(*arguments: Any, **named: Any) -> Any:
        with contextlib.suppress(OSError):  # the program ended: there is no answer
            calls.write(repr((arguments, named)) + "\n")
            calls.flush()
        return answer()

    sys.modules["problem"] = problem = types.ModuleType("problem")
    random.seed(0)
    try:
        prompt, test = (compile(given[part], part, "exec") for part in ("prompt", "test"))
    except (SyntaxError, ValueError):
        sys.exit(UNREADABLE)
    try:
        answer()  # whether the program could be run
        # Some tests call what the prompt defines beside the function, or the function by its name.
        exec(prompt, vars(problem))
        setattr(problem, given["entry_point"], candidate)
        exec(test, vars(problem))
        problem.check(candidate)
    except EndedError:
        sys.exit(ENDED)
    except RaisedError:
        sys.exit(RAISED)
    except Exception:  # an assertion, or an operation that the answer has not
        sys.exit(WRONG)
    sys.exit(PASSED)


if __name__ == "__main__":
    main()
