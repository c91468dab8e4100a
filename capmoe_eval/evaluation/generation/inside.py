"""Run one side of a problem inside a sandbox: the model's function, or the test that calls it.

This is a script that imports nothing of the suite. ``/given`` has the arguments of :func:`serve` or
of :func:`check`. Each line that the test sends has the arguments of a call. The first line that the
function's side sends says whether the program could be run, and each further line whether a call
returned, and what it returned or raised.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

PASSED, WRONG, RAISED, ENDED, UNREADABLE = 0, 10, 11, 12, 13
"""The verdicts, which are the test's exit status."""
_LONGEST = 2**24  # characters of an answer
# A boolean is an integer, too.
_SCALARS: tuple[type[Any], ...] = (str, bytes, bool, int, float, complex)
_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, set)


class RaisedError(Exception):
    """The function raised an exception."""


class EndedError(Exception):
    """The program ended, or what it says cannot be read."""


def serve(calls: TextIO, answers: TextIO, *, program: str, entry_point: str) -> int:
    """Define a function, and answer calls of it until there are no more."""
    sys.modules["program"] = module = types.ModuleType("program")

    def define() -> None:
        exec(compile(program, "program.py", "exec"), vars(module))

    def call(line: str) -> Any:
        arguments, named = ast.literal_eval(line)
        return plain(getattr(module, entry_point)(*arguments, **named))

    def answer(function: Callable[..., Any], *arguments: Any) -> None:
        try:
            text = repr((True, function(*arguments)))
        except BaseException as error:
            text = repr((False, type(error).__name__))
        answers.write(text + "\n")
        answers.flush()

    answer(define)
    for line in calls:
        answer(call, line)
    return 0


def plain(value: Any) -> Any:
    """Return a value as Python's own types, which compare as it does; others are refused."""
    if value is None:
        return None
    for scalar in _SCALARS:
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for collection in _COLLECTIONS:
        if isinstance(value, collection):
            return collection(plain(item) for item in value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def check(answers: TextIO, calls: TextIO, *, prompt: str, test: str, entry_point: str) -> int:
    """Return the verdict of a test on the function that answers."""

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
        prompt_code, test_code = compile(prompt, "prompt", "exec"), compile(test, "test", "exec")
    except (SyntaxError, ValueError):
        return UNREADABLE
    try:
        answer()  # whether the program could be run
        # Some tests call what the prompt defines beside the function, or the function by its name.
        exec(prompt_code, vars(problem))
        setattr(problem, entry_point, candidate)
        exec(test_code, vars(problem))
        problem.check(candidate)
    except EndedError:
        return ENDED
    except RaisedError:
        return RAISED
    except Exception:  # an assertion, or an operation that the answer has not
        return WRONG
    return PASSED


def main() -> None:
    """Do what ``/given`` asks, and exit with its status."""
    source, output = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a program or a test prints is no answer and no call
        os.dup2(nothing, stream)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    arguments = json.loads(Path("/given").read_text(encoding="utf-8"))
    sys.exit((serve if "program" in arguments else check)(source, output, **arguments))


if __name__ == "__main__":
    main()
