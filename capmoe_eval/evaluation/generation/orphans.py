"""Adopt and reap the processes that bubblewrap leaves behind.

A sandbox has two processes of bubblewrap. The outer ends as soon as the program does, or is killed;
the first process inside ends a moment later, and becomes a child of the nearest subreaper, or of
the machine's first process. In a container that is often a program that reaps no children but those
that it started. While sandboxes run, this process is a subreaper; it reaps the processes whose
numbers bubblewrap reported, and no other child. Another orphan that it adopts meanwhile stays until
this process ends, as it does where this is a container's first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import IO

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # of prctl(2)
_lock = threading.Lock()
_before: list[bool] = []  # for each block that is open, whether this was a subreaper when it began


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Be a subreaper within the block; the last of several blocks restores what was before."""
    with _lock:
        _before.append(_before[0] if _before else _is_subreaper())
        _become_subreaper(True)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                _become_subreaper(before)


def end(process: subprocess.Popen[bytes], report: IO[bytes]) -> None:
    """Kill the outer process of a sandbox and the first inside, which takes all others with it.

    ``report`` is where bubblewrap writes by ``--info-fd``. Before it wrote, the number of the first
    process inside is not known, and that process may wait for the outer for ever.
    """
    while _first_inside(report) is None and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    pid = _first_inside(report)
    if pid is None:  # bubblewrap ended before there was one
        return
    with contextlib.suppress(ChildProcessError):  # it is no child: another process reaped it
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)  # a child that is not reaped keeps its number
        os.waitpid(pid, 0)


def _first_inside(report: IO[bytes]) -> int | None:
    number = re.search(rb'"child-pid": *(\d+)\D', os.pread(report.fileno(), 4096, 0))
    return int(number[1]) if number else None


def _is_subreaper() -> bool:
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def _become_subreaper(value: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(value), 0, 0, 0)
