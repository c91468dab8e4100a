"""Complete bubblewrap: refuse some system calls, and reap the processes that stay.

The filter refuses the calls that reach what namespaces and limits do not bound. It is one of
seccomp: a classic BPF program over the number of each call
(https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html).

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
import errno
import mmap
import os
import re
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import IO

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Each machine's number for audit."""
MACHINES = tuple(_AUDIT)
"""Machines, as ``platform.machine`` names them, whose calls are known."""

#: The calls that fail with EPERM, and their numbers on each of the machines.
_REFUSED = {
    # Memory that stays when it is not mapped, or only a page of it: beyond RLIMIT_AS.
    "shmget": (29, 194),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "semget": (64, 190),
    "msgget": (68, 186),
    "socket": (41, 198),  # AF_VSOCK and others that no network namespace holds
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # does what the calls above do, unseen by a filter
}

# So is memory without a file that processes share: a page of it keeps all of it.
_MAP = (9, 222)
_SHARED_MEMORY = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_KILL, _ALLOW, _EPERM = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _MACHINE, _FLAGS = 0, 4, 40  # offsets in what a filter sees of a call; mmap's fourth
_X32 = 0x40000000  # from here on, the same calls of x86_64 under other numbers

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # of prctl(2)
_lock = threading.Lock()
_before: list[bool] = []  # for each block that is open, whether this was a subreaper when it began


def call_filter(machine: str) -> bytes:
    """Return the filter for one of :data:`MACHINES`, as bubblewrap's ``--seccomp`` reads it."""
    place = MACHINES.index(machine)
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for numbers in _REFUSED.values():
        steps += [(_EQUAL, 0, 1, numbers[place]), (_RETURN, 0, 0, _EPERM)]
    steps += [
        (_EQUAL, 0, 4, _MAP[place]),
        (_LOAD, 0, 0, _FLAGS),
        (_AND, 0, 0, _SHARED_MEMORY),
        (_EQUAL, 0, 1, _SHARED_MEMORY),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Be a subreaper within the block; the last of several blocks restores what was before."""
    prctl = ctypes.CDLL(None).prctl
    with _lock:
        value = ctypes.c_int()
        prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
        _before.append(_before[0] if _before else bool(value.value))
        prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(True), 0, 0, 0)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(before), 0, 0, 0)


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
