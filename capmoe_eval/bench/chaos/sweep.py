"""A sweep as a process of its own behind a terminal, whose progress says what it is doing."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

STAGES: Final = ("starting", "loading", "computing", "writing", "waiting", "ending")
"""The stages of a sweep: ``writing`` is any step on files (of a record or a reservation)."""

_BEGUN: Final = re.compile(r"\[\d+/\d+\] (?P<cell>[^:\r\n]+) …")
_ENDED: Final = re.compile(r"\[(?P<done>\d+)/(?P<all>\d+)\] (?P<cell>[^:\r\n]+): [^\r\n]*\r\n")
_LOADING: Final = re.compile(r"loading \S+ …")
_WAITING: Final = re.compile(r"waiting for \S+ \(\d+\)")

_PATHS: Final = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")
_OPENS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Sweep:
    """A process that computes a results directory, until :attr:`status` says how it ended.

    Args:
        work: What it does, in a fork of this process; its status. It may execute a program.
        root: The results directory.
        pause_at: Stand still before this step on the directory's files (1 is the first), until
            :meth:`go_on`; only for work that does not execute a program.
        environment: Variables that it has in addition.
        launches: Whether it starts the processes that do the work, as ``torchrun``.
    """

    def __init__(
        self,
        work: Callable[[], int | None],
        root: Path,
        *,
        pause_at: int | None = None,
        environment: Mapping[str, str] | None = None,
        launches: bool = False,
    ) -> None:
        self.status: int | None = None  # as subprocess has it: negative for a signal
        self.seconds = 0.0  # processor time, when it has ended
        self.paused = False
        self._root, self._said, self._launches = root, b"", launches
        self._gate: socket.socket | None = None
        inside: socket.socket | None = None
        if pause_at is not None:
            self._gate, inside = socket.socketpair()
        self.process, self._terminal = pty.fork()
        if not self.process:
            for other in _alive:  # whose terminals it must not hold open
                other.forget()
            os.environ.update(environment or {})
            if pause_at is not None and inside is not None:
                sys.addaudithook(_Steps(root, pause_at, inside))
            _become(work)
        if inside is not None:
            inside.close()
        os.set_blocking(self._terminal, False)
        _alive.append(self)

    def forget(self) -> None:
        """Close this process's end of the terminal."""
        with suppress(OSError):
            os.close(self._terminal)
        if self._gate is not None:
            self._gate.close()

    @property
    def ends(self) -> list[Any]:
        """The files that are readable when something has happened."""
        return [self._terminal, *([] if self._gate is None else [self._gate])]

    @property
    def text(self) -> str:
        """All that was printed."""
        return self._said.decode(errors="replace")

    @property
    def computing(self) -> str | None:
        """The cell that it computes."""
        begun, ended = _last(_BEGUN, self.text), _last(_ENDED, self.text)
        if begun is None or (ended and ended.end() > begun.end()):
            return None
        return begun["cell"]

    @property
    def stage(self) -> str:
        """Its stage, one of :data:`STAGES`."""
        if self.paused or any(self._root.rglob(f".*.{self.process}.*.tmp")):
            return "writing"
        marks = {"computing": _BEGUN, "loading": _LOADING, "waiting": _WAITING}
        found = {name: _last(mark, self.text) for name, mark in marks.items()}
        ends = {name: match.end() for name, match in found.items() if match}
        ended, stage = _last(_ENDED, self.text), max(ends, key=ends.__getitem__, default="starting")
        if ended is not None and ended.end() >= ends.get(stage, 0):
            return "ending" if ended["done"] == ended["all"] else "writing"
        return stage

    def processor_time(self) -> float:
        """Return the processor seconds of it, or of the busiest process that it has started."""
        try:
            own = psutil.Process(self.process)
            times = [each.cpu_times() for each in (own, *self.launched())]
        except psutil.Error:
            return 0.0
        return max(each.user + each.system for each in times)

    def launched(self) -> list[psutil.Process]:
        """Return the processes that it has started to do the work."""
        return psutil.Process(self.process).children() if self._launches else []

    def go_on(self) -> None:
        """Let it take the step that it stands still before."""
        self.paused = False
        if self._gate is not None:
            with suppress(OSError):
                self._gate.send(b".")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended gets none."""
        if self.status is None:
            os.kill(self.process, number)

    def control_c(self) -> None:
        """Press Ctrl-C in its terminal."""
        with suppress(OSError):
            os.write(self._terminal, b"\x03")

    def read(self) -> None:
        """Take in what it has printed, whether it stands still, and whether it has ended."""
        if self.status is not None:
            return
        ended, status, used = os.wait4(self.process, os.WNOHANG)
        with suppress(OSError):  # EIO where the process has closed its end
            while part := os.read(self._terminal, 65536):
                self._said += part
        if ended:
            self.seconds = used.ru_utime + used.ru_stime
            self._ended(os.waitstatus_to_exitcode(status))
        elif self._gate is not None and select.select([self._gate], [], [], 0)[0]:
            with suppress(OSError):
                self.paused = bool(self._gate.recv(1)) or self.paused

    def end(self) -> None:
        """Kill it and all that it has started."""
        if self.status is None:
            started = []
            with suppress(psutil.Error):
                started = psutil.Process(self.process).children(recursive=True)
            for process in started:
                with suppress(psutil.Error):
                    process.kill()
            self.signal(signal.SIGKILL)
            os.waitpid(self.process, 0)
            self._ended(-signal.SIGKILL)

    def _ended(self, status: int) -> None:
        self.status, self.paused = status, False
        _alive.remove(self)
        self.forget()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(pattern.finditer(text), key=re.Match.end, default=None)


_alive: Final[list[Sweep]] = []


def watch(seconds: float) -> None:
    """Wait until any sweep prints something, but no longer than that, and read them all."""
    select.select([end for sweep in _alive for end in sweep.ends], [], [], seconds)
    for sweep in tuple(_alive):
        sweep.read()


class _Steps:
    """Counts the steps that change a directory, and stands still before one of them."""

    def __init__(self, root: Path, pause_at: int, gate: socket.socket) -> None:
        self._root, self._left, self._gate = str(root), pause_at, gate

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        """Hear of an event, as sys.addaudithook has it."""
        if self._left <= 0 or event not in _PATHS or not isinstance(given[0], (str, Path)):
            return
        if not str(given[0]).startswith(self._root) or (event == "open" and not given[2] & _OPENS):
            return
        self._left -= 1
        if not self._left:
            self._gate.send(b".")
            self._gate.recv(1)  # nothing at all where the other end is gone


def _become(work: Callable[[], int | None]) -> None:
    """Do the work of a forked process, with its terminal, and end."""
    status = 70
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ours = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if ours else signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        )
        status = work() or 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else status
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
