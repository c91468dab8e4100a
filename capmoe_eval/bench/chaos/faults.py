"""The faults that happen to sweeps, and how a sweep must end of each."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from capmoe_eval.bench.chaos.sweep import Sweep
from capmoe_eval.experiment.interrupts import INTERRUPTED

_CLONE_NEWNS: Final = 0x00020000
_DISK: Final = "600k"
_LIMIT: Final = 1000  # bytes of a file


@dataclass(frozen=True)
class Fault:
    """Something that happens to a sweep, or to all sweeps of a directory."""

    about: str
    strike: Callable[[Sweep], None]  # to one sweep
    ends: tuple[int, ...]  # how it must end, as Sweep.status has it, unless it had finished
    line: str = ""  # what its last line must contain
    all: bool = False  # whether it happens to all sweeps of the directory at the same moment
    ranks: bool = False  # whether the sweep is two ranks


def _twice(sweep: Sweep) -> None:
    sweep.control_c()
    sweep.control_c()


def _one_rank(sweep: Sweep) -> None:
    """Kill a rank: one that ``torchrun`` has started, else the process itself."""
    with suppress(psutil.Error):
        ranks = sweep.launched()
        if ranks:
            ranks[sweep.process % len(ranks)].kill()
            return
    sweep.signal(signal.SIGKILL)


def _limit(sweep: Sweep) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(sweep.process, resource.RLIMIT_FSIZE, (_LIMIT, _LIMIT))


FAULTS: Final = {
    "kill": Fault("SIGKILL of one process", lambda sweep: sweep.signal(signal.SIGKILL), (-9,)),
    "term": Fault(
        "SIGTERM of one process",
        lambda sweep: sweep.signal(signal.SIGTERM),
        (128 + signal.SIGTERM,),
        INTERRUPTED,
    ),
    "int": Fault("Ctrl-C", Sweep.control_c, (128 + signal.SIGINT,), INTERRUPTED),
    # No line: the terminal may show the second as ^C after it.
    "int2": Fault("Ctrl-C twice at once", _twice, (128 + signal.SIGINT,)),
    "all": Fault(
        "SIGKILL of all processes at once",
        lambda sweep: sweep.signal(signal.SIGKILL),
        (-9,),
        all=True,
    ),
    "disk": Fault("a full disk", _limit, (2,), "cannot be written", all=True),
    "rank": Fault(
        "SIGKILL of one rank of two",
        _one_rank,
        (-9, 1),  # 1 of torchrun
        ranks=True,
    ),
}
"""Every kind of fault. Without a disk of its own, ``disk`` is a limit on the size of files."""


class Disk:
    """A small file system in memory that can be filled; OSError if it cannot be mounted."""

    def __init__(self, place: Path) -> None:
        self.place, self._ballast = place, place / "ballast"
        _own_mounts()
        place.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={_DISK}", "chaos", str(place))

    def fill(self) -> None:
        """Leave no room on it."""
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Make room again."""
        self._ballast.unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount it; all that is on it is lost."""
        subprocess.run(("umount", "--lazy", str(self.place)), check=False)


@functools.cache
def _own_mounts() -> None:
    """Have mounts that no other process sees, and that end with the last process that does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("--make-rprivate", "/")


def _mount(*words: str) -> None:
    done = subprocess.run(("mount", *words), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.returncode, done.stderr.strip())
