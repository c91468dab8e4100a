"""Say on standard error what a long command is doing, now and then, also in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

Say = Callable[[str], None]
"""Takes a line that says what is done."""

_SECONDS: Final = 5.0


def silent(_line: str) -> None:
    """Say nothing."""


class StatusLines:
    """Prints the line that it is called with, but at most one every few seconds.

    A command that is done before says nothing. Each line has the seconds since the first moment.

    Args:
        name: The command's name, before every line.
        stream: Stream to write to; standard error by default.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._stream, self._clock = name, stream or sys.stderr, clock
        self._started = self._printed = clock()

    def __call__(self, line: str) -> None:
        """Print a line, unless another was printed within the last seconds."""
        now = self._clock()
        if now - self._printed >= _SECONDS:
            self._printed = now
            elapsed = now - self._started
            print(f"{self._name}: {line}, {elapsed:.0f} s", file=self._stream, flush=True)
