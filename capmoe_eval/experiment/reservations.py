"""Reserve a record while its cell is computed, among the processes of one or several machines.

Other files that several processes write are held in the same way while they are. The lock is
filelock's, of the hidden file ``.<record>.lock`` beside the record, which says who holds it. The
kernel releases it when its process ends, however that ends; what the process left is removed by who
reserves the record next. Where a file system has no locks, the file's existence is the lock.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final

from filelock import FileLock, SoftFileLock, Timeout

from capmoe_eval.experiment.files import remove_temporaries

NOTICE: Final = 10.0
"""Seconds of waiting to hold a file, after which a warning says for whom."""
_SUFFIX: Final = ".lock"
_POLL: Final = 0.01  # seconds between two attempts
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO)
"""Errors of a file system that has no locks."""


class Reservation:
    """A record that is reserved for this process; the end of its ``with`` block releases it.

    So does :func:`release_all`, if an interrupt comes before the block begins.
    """

    held: ClassVar[set[Reservation]] = set()

    def __init__(self, lock: FileLock | SoftFileLock) -> None:
        self._lock = lock
        self.held.add(self)

    def __enter__(self) -> Reservation:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it, and remove its file."""
        # Before the release: who waits sees that the file it opened has no name, and makes another.
        try:
            with suppress(OSError):
                Path(self._lock.lock_file).unlink()
        finally:
            self._lock.release()
            self.held.discard(self)


def release_all() -> None:
    """Release what this process holds."""
    for reservation in list(Reservation.held):
        reservation.__exit__()


def holder_of(record: Path) -> str | None:
    """Return host and process that hold a record, dead or alive, or None if nobody says so."""
    try:
        process, host, *_ = _place(record).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return f"{host}:{process}"


def reserved(directories: Iterable[Path]) -> set[Path]:
    """Return the records of some directories that anybody holds, or held until it was killed."""
    records = set()
    for directory in directories:
        with suppress(FileNotFoundError, NotADirectoryError):
            locks = directory.glob(f".*{_SUFFIX}")
            records |= {lock.with_name(lock.name[1 : -len(_SUFFIX)]) for lock in locks}
    return records


def reserve(record: Path, seconds: float = 0.0) -> Reservation | None:
    """Reserve a record for this process, and remove what a killed one left of it.

    Return None where another process holds it for so many seconds, below 0 without a limit; OSError
    if nothing can be written beside it.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    place = _place(record)
    lock: FileLock | SoftFileLock = FileLock(place, poll_interval=_POLL, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=seconds)
            place.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
        except OSError as error:
            if isinstance(error, Timeout) or error.errno not in _NO_LOCKS:
                raise
            if place.stat().st_size == 0:  # the attempt made it; a holder's has its name
                place.unlink()
            lock = SoftFileLock(place, poll_interval=_POLL)
            lock.acquire(timeout=seconds)
        remove_temporaries(record)
        return Reservation(lock)
    except Timeout:
        return None
    except BaseException:  # an interrupt, too: what is held goes
        if lock.is_locked:
            Reservation(lock).__exit__()
        raise


def print_warning(line: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


@contextmanager
def hold(file: Path, warn: Callable[[str], None] = print_warning) -> Iterator[None]:
    """Hold a file in this block; wait while another process does.

    ``warn`` is told who that is, if it takes long. OSError if nothing can be written beside it.
    """
    if (reservation := reserve(file, NOTICE)) is None:
        warn(f"waiting for {holder_of(file) or 'another process'}, which holds {file}")
        reservation = reserve(file, -1.0)
    assert reservation is not None  # without a limit it waits
    with reservation:
        yield


def tidy(directories: Iterable[Path]) -> None:
    """Remove what killed processes left beside records; what cannot be removed stays."""
    for record in reserved(directories):
        with suppress(OSError):
            if (reservation := reserve(record)) is not None:
                with reservation:
                    pass


def _place(record: Path) -> Path:
    return record.with_name(f".{record.name}{_SUFFIX}")
