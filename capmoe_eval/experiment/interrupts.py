"""End a command by Ctrl-C, SIGTERM or SIGHUP: one line and one status, whatever comes after.

The first signal interrupts the command. While the command cleans up, and until its process has
ended, further signals change neither line nor status. If that takes longer than :data:`GRACE`
seconds, the next signal ends the process at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

INTERRUPTED: Final = "interrupted: finished cells are kept, the same command continues"
"""The line that a command ends with after Ctrl-C, SIGTERM or SIGHUP."""
GRACE: Final = 3.0
"""Seconds after the first signal, or after the command, in which further signals are ignored."""

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Command:
    """The command whose signals are handled."""

    process: int = 0  # of the command; 0 while there is none. A fork of it prints nothing.
    first: int | None = None  # the first signal
    since: float = 0.0  # the time of the first signal, or of the end of the command
    status: int = 0  # that it ends with
    ending: bool = False
    printed: bool = False  # whether the line is
    current: ClassVar[_Command]  # whose signals are handled now

    def handle(self, number: int) -> None:
        """Interrupt the command, once; end the process where its end takes too long."""
        if self.first is None and not self.ending:
            self.first, self.since, self.status = number, time.monotonic(), 128 + number
            raise KeyboardInterrupt(number)
        if not (self.ending or _is_cleaning_up()):  # a library has swallowed the first interrupt
            raise KeyboardInterrupt(self.first)
        if time.monotonic() - self.since > GRACE:
            if self.first is not None:
                self.print_line()
            os._exit(self.status)

    def end(self) -> None:
        """Take no further signal as a reason to interrupt the command: it is over."""
        self.ending = True
        if self.first is None:
            self.since = time.monotonic()

    def print_line(self) -> None:
        """Print that the command was interrupted, unless that is printed."""
        if not self.printed and self.process in (0, os.getpid()):
            with suppress(OSError, RuntimeError):  # RuntimeError: a print was interrupted
                print(INTERRUPTED, file=sys.stderr, flush=True)
        self.printed = self.process != 0


_Command.current = _Command()


def _handle(number: int, _frame: object) -> None:
    _Command.current.handle(number)


def _is_cleaning_up() -> bool:
    """Return whether an interrupt is being handled, as in a ``finally`` or an ``except``."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def _to_handle() -> dict[signal.Signals, Any]:
    """Return the signals that end this process by default, with their handlers.

    Signals that are ignored, as under nohup, are not among them, nor those of a command that runs.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    return {number: old for number in _NUMBERS if (old := signal.getsignal(number)) in defaults}


def _begin(numbers: Iterable[signal.Signals]) -> None:
    _Command.current = _Command(os.getpid())
    for number in numbers:
        signal.signal(number, _handle)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP interrupt this block as Ctrl-C does, unless they are ignored."""
    before = _to_handle()
    try:
        if before:
            _begin(before)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before:
            _Command.current = _Command()


def end_interrupted(error: KeyboardInterrupt) -> int:
    """Print that the command was interrupted, once, and return its status."""
    command = _Command.current
    command.print_line()
    command.ending = command.process != 0
    if command.first is not None:
        return 128 + command.first
    return 128 + (error.args[0] if error.args else signal.SIGINT)


@contextmanager
def interrupts_not_hidden() -> Iterator[None]:
    """Interrupt again where a library, such as one that is just imported, made an error of it."""
    try:
        yield
    except Exception as error:
        if (first := _Command.current.first) is not None:
            raise KeyboardInterrupt(first) from error
        raise


def exit_after(work: Callable[[], int]) -> NoReturn:
    """Do the work of this process, and exit with its status; take its signals to the very end."""
    atexit.register(_ignore)  # before others: what is registered first is called last
    status = 1
    try:
        try:
            _begin(_to_handle())
            status = _Command.current.status = work()
        finally:
            _Command.current.end()
    except KeyboardInterrupt as error:  # between two lines above
        status = end_interrupted(error)
    sys.exit(status)


def _ignore() -> None:
    """Ignore the signals from now on: Python is about to forget how they are handled."""
    for number in _NUMBERS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_IGN)
