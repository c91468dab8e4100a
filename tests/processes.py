"""Processes that start in milliseconds, as forks of one that has imported the libraries."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["capmoe_eval.evaluation.run", "capmoe_eval.evaluation.lm"])


class Process:
    """A process of its own that calls a function, with the methods of ``subprocess.Popen``.

    Args:
        work: A function of a module, whose return or SystemExit ends the process.
        arguments: Its arguments.
        cwd: The working directory, by default this process's.
        environment: Variables beside this process's.
    """

    def __init__(
        self,
        work: Callable[..., object],
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._said = [Path(self._directory.name, name) for name in ("out", "err")]
        for path in self._said:  # it may be ended before it opens them
            path.touch()
        place, variables = cwd or Path.cwd(), {**os.environ, **(environment or {})}
        # As a child of this process, not of the server, which may have been started under nohup.
        handled = {
            number: signal.SIG_IGN if signal.getsignal(number) is signal.SIG_IGN else signal.SIG_DFL
            for number in (signal.SIGTERM, signal.SIGHUP)
        }
        given = (self._said, place, variables, handled, work, *arguments)
        self._process = _SERVER.Process(target=_become, args=given, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The status, negative for a signal; None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return its standard output and standard error."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("", timeout or 0)
        out, err = (path.read_text(encoding="utf-8") for path in self._said)
        return out, err


def _become(
    said: list[Path],
    cwd: Path,
    environment: Mapping[str, str],
    handled: Mapping[signal.Signals, signal.Handlers],
    work: Callable[..., object],
    *arguments: object,
) -> None:
    for signaled, how in handled.items():
        signal.signal(signaled, how)
    for number, path in enumerate(said, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    work(*arguments)
