"""Define a model's function inside the sandbox, and answer calls of it.

``/given`` has the program and the function's name. Each line of standard input has the arguments of
a call. The first line of standard output says whether the program could be run, and each further
line whether a call returned, and what it returned or raised.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A boolean is an integer, too.
_SCALARS: tuple[type[Any], ...] = (str, bytes, bool, int, float, complex)
_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, set)


def main() -> None:
    """Answer until there are no more calls."""
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what the program prints is no answer
        os.dup2(nothing, stream)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    given = json.loads(Path("/given").read_text(encoding="utf-8"))
    sys.modules["program"] = module = types.ModuleType("program")

    def define() -> None:
        exec(compile(given["program"], "program.py", "exec"), vars(module))

    def call(line: str) -> Any:
        arguments, named = ast.literal_eval(line)
        return plain(getattr(module, given["entry_point"])(*arguments, **named))

    def answer(function: Callable[..., Any], *arguments: Any) -> None:
        try:
            said = repr((True, function(*arguments)))
        except BaseException as error:
            said = repr((False, type(error).__name__))
        answers.write(said + "\n")
        answers.flush()

    answer(define)
    for line in calls:
        answer(call, line)


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


if __name__ == "__main__":
    main()
