"""Reserve a record while its cell is computed, among the processes of several machines.

Other files that several processes write are held in the same way while they are.

A reservation is a hidden directory beside the record, ``.<record>.reservation``, with one empty
file whose name says who holds it. Every step is one rename, which is whole or not at all on local
disks and on NFS (RFC 1813, 3.3.14), so a process may be killed at any moment:

- Reserve: a directory that has the holder's file already is renamed to the reservation, which
  fails unless that is absent or empty.
- Take over: the dead holder's file is renamed to the new holder's. Of several that try, one finds
  the old name. (A lock file that is removed and made anew can be taken by two: D. Yost on
  comp.unix.wizards, 18 August 1981.)
- Release: the own file is removed, and then the directory, which fails unless it is empty.

On one machine a holder is dead if its process is. On another it is dead if its file, whose time it
renews, was not renewed for :data:`SILENCE` seconds, by the clock of whoever waits.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.files import remove_temporaries

BEAT: Final = 15.0
"""Seconds between a holder's signs of life."""
SILENCE: Final = 180.0
"""Seconds without one after which another machine's holder is dead; NFS shows one 60 s late."""
_DAY: Final = 24 * 60 * 60
_PAUSES: Final = (0.005, 1.0)
"""Seconds between attempts to hold a file: at first, and at most."""
NOTICE: Final = 10.0
"""Seconds of waiting to hold a file, after which a warning says for whom."""

_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT)
"""Errors of the rename to a reservation that may be somebody's: of a second attempt, one's own."""

_SUFFIX, _CANDIDATE = ".reservation", ".candidate"
_NAME: Final = re.compile(
    r"(?P<host>.+)\.(?P<pid>\d{1,9})\.(?P<start>\d+)\.(?P<system>[0-9a-f]{8})\.[0-9a-f]{8}"
)


@dataclass(frozen=True)
class Holder:
    """The process that holds a reservation, as the name of its file says."""

    file: Path

    def __str__(self) -> str:
        """Return host and process."""
        parts = _NAME.fullmatch(self.file.name)
        return f"{parts['host']}:{parts['pid']}" if parts else self.file.name

    def lives(self) -> bool | None:
        """Return whether its process lives, or None if that is another machine's to know."""
        parts = _NAME.fullmatch(self.file.name)
        if not parts or parts["system"] != _system():
            return None
        return _lives(int(parts["pid"]), parts["start"])


class Watch:
    """Finds out which holders are dead."""

    def __init__(self) -> None:
        # Of each holder on another machine: the time of its file, and since when that is known.
        self._known: dict[Path, tuple[int, float]] = {}

    def live_holder(self, record: Path) -> Holder | None:
        """Return who holds the reservation of a record, or None if nobody who lives."""
        holder = holder_of(record)
        return None if holder is None or self.dead(holder) else holder

    def dead(self, holder: Holder) -> bool:
        """Return whether a holder is known to be dead."""
        lives = holder.lives()
        if lives is not None:
            return not lives
        try:
            renewed = holder.file.stat().st_mtime_ns
        except FileNotFoundError:  # released, or taken over, by now
            return False
        now = time.monotonic()
        last_renewal, since = self._known.get(holder.file, (None, now))
        self._known[holder.file] = (renewed, since if last_renewal == renewed else now)
        return last_renewal == renewed and now - since > SILENCE


class Reservation:
    """A record that is reserved for this process: renewed in a ``with`` block, released after."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._done = threading.Event()

    def held(self) -> bool:
        """Return whether it is still held: a process that was stopped for long may have lost it."""
        return self._file.exists()

    def __enter__(self) -> Reservation:
        """Begin to renew it."""
        threading.Thread(target=self._renew, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release it, if it is still held."""
        self._done.set()
        _release(self._file)

    def _renew(self) -> None:
        while not self._done.wait(BEAT):
            with suppress(OSError):
                os.utime(self._file)


def holder_of(record: Path) -> Holder | None:
    """Return who holds the reservation of a record, dead or alive, or None."""
    return _holder(_place(record))


def reserved(directories: Iterable[Path]) -> set[Path]:
    """Return the records of some directories that anybody reserves, dead or alive."""
    records = set()
    for directory in directories:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = (entry.name for entry in os.scandir(directory))
            records |= {directory / n[1 : -len(_SUFFIX)] for n in names if n.endswith(_SUFFIX)}
    return records


def reserve(record: Path, watch: Watch) -> Reservation | None:
    """Reserve a record for this process; None where another holds it.

    The reservation of a dead process is taken over, and what that left of the record removed.

    Raises:
        OSError: If nothing can be written beside the record.
        UsageError: If something else stands in the reservation's place.
    """
    place = _place(record)
    own_file = place / _own_name()
    holder = _holder(place)
    if holder is None:
        _occupy(own_file)
    elif not watch.dead(holder) or not _take_over(holder, own_file):
        return None
    # Not the outcome of the rename: NFS may try twice, and report the first success as a failure.
    return Reservation(own_file) if own_file.exists() else None


def print_warning(line: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


@contextmanager
def hold(file: Path, warn: Callable[[str], None] = print_warning) -> Iterator[None]:
    """Hold the reservation of a file in this block; wait while a process that lives holds it.

    ``warn`` is told who that is, if it takes long.

    Raises:
        OSError: If nothing can be written beside the file.
        UsageError: If something else stands in the reservation's place.
    """
    watch, since, (pause, longest) = Watch(), time.monotonic(), _PAUSES
    while (reservation := reserve(file, watch)) is None:
        time.sleep(pause)
        pause = min(2 * pause, longest)
        if time.monotonic() - since > NOTICE and (holder := watch.live_holder(file)) is not None:
            warn(f"waiting for {holder}, which holds {file}")
            since = math.inf
    with reservation:
        yield


def refuse_others(directories: Iterable[Path]) -> None:
    """Refuse what stands in a reservation's place in some directories and is none.

    Raises:
        UsageError: With its path.
    """
    for record in sorted(reserved(directories)):
        _refuse_other(_place(record))


def _refuse_other(place: Path) -> None:
    if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
        raise UsageError(
            f"{place}: is no reservation of this suite, and stands where one is made; move it or "
            "delete it"
        )


def release_all(directories: Iterable[Path]) -> None:
    """Release what this process holds, as where an interrupt came between two steps of reserving.

    What cannot be removed stays.
    """
    this = _process_name()
    for directory in directories:
        with suppress(OSError):
            for own_file in directory.glob(f".*{_SUFFIX}/{this}*"):
                _release(own_file)
            for candidate in directory.glob(f".{this}*{_CANDIDATE}"):
                shutil.rmtree(candidate, ignore_errors=True)


def tidy(directories: Iterable[Path]) -> None:
    """Remove what dead processes left beside records: of this machine's, and others' after a day.

    What cannot be removed stays.
    """
    for directory in directories:
        for place in directory.glob(f".*{_SUFFIX}"):
            with suppress(OSError):
                holder = _holder(place)
                if holder is None:
                    place.rmdir()
                elif _abandoned(holder) and _take_over(holder, own_file := place / _own_name()):
                    _release(own_file)
        for place in directory.glob(f".*{_CANDIDATE}"):
            with suppress(OSError):
                if _abandoned(Holder(place.with_name(place.name[1 : -len(_CANDIDATE)])), place):
                    shutil.rmtree(place)


def _place(record: Path) -> Path:
    return record.with_name(f".{record.name}{_SUFFIX}")


def _holder(place: Path) -> Holder | None:
    try:
        return next((Holder(file) for file in sorted(place.iterdir())), None)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _occupy(own_file: Path) -> None:
    """Make a reservation that nobody holds; it may turn out to be another's."""
    place = own_file.parent
    candidate = place.with_name(f".{own_file.name}{_CANDIDATE}")
    candidate.mkdir(parents=True)
    try:
        (candidate / own_file.name).touch()
        candidate.rename(place)
    except OSError as error:
        if error.errno not in _TAKEN:
            _refuse_other(place)
            raise
    finally:
        shutil.rmtree(candidate, ignore_errors=True)


def _take_over(holder: Holder, own_file: Path) -> bool:
    """Make a dead holder's reservation one's own; return whether that succeeded."""
    with suppress(FileNotFoundError):  # another was faster
        holder.file.rename(own_file)
    if not own_file.exists():
        return False
    place = own_file.parent
    remove_temporaries(place.with_name(place.name[1 : -len(_SUFFIX)]))
    return True


def _release(own_file: Path) -> None:
    with suppress(OSError):
        own_file.unlink()
        own_file.parent.rmdir()


def _abandoned(holder: Holder, file: Path | None = None) -> bool:
    lives = holder.lives()
    if lives is None:
        return time.time() - (file or holder.file).stat().st_mtime > _DAY
    return not lives


def _own_name() -> str:
    """Return a name for a file of this process that no other file has."""
    return f"{_process_name()}{secrets.token_hex(4)}"


def _process_name() -> str:
    """Return what the names of all files of this process begin with."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname()) or "localhost"
    start = _started(os.getpid()) or "0"
    return f"{host}.{os.getpid()}.{start}.{_system()}."


@functools.cache
def _system() -> str:
    """Return eight digits for this machine since its start, and this container of it.

    They are random, so that nothing is taken for this machine's, where there is no ``/proc``.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return secrets.token_hex(4)
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _lives(pid: int, start: str) -> bool:
    if (start_time := _started(pid)) is not None:
        return start_time == start
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's, which /proc may hide
        return True
    except ProcessLookupError:
        pass
    return False


def _started(pid: int) -> str | None:
    """Return when a process was started, in ticks since the machine's start; None if it is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the command may contain anything
    return None if state in "ZX" else fields[18]
