"""Files that are written whole or not at all."""

from __future__ import annotations

import glob
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from capmoe_eval.errors import writing

_TEMPORARY = re.compile(r"\..+?(\.(?P<pid>[0-9]{1,9}))?\.[a-z0-9_]{8}\.tmp")
"""The name of a temporary file: the file's own, the process (not in old ones), eight characters."""


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends, and not at all if it raises.

    It is a temporary file in the same directory, flushed to the disk and renamed. Missing parent
    directories are created. Without ``durable`` nothing waits for the disk, and a power failure may
    leave an empty file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``data``; a reader always finds the whole old or the whole new file.

    See :func:`whole_file`; of an OSError nothing is left behind.
    """
    with whole_file(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace ``path`` by ``text`` in UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"), durable=durable)


def remove_strays(directories: Iterable[Path]) -> list[Path]:
    """Remove what killed writers left in some directories, and return it.

    A temporary file is removed when it is older than a day and its writer is no process of this
    machine; another machine may write here too, but not for a day.
    """
    import psutil

    removed = []
    yesterday = time.time() - 24 * 60 * 60
    for directory in directories:
        for path in sorted(directory.glob(".*.tmp")):
            named = _TEMPORARY.fullmatch(path.name)
            if not named or (named["pid"] and psutil.pid_exists(int(named["pid"]))):
                continue
            try:
                if path.stat().st_mtime < yesterday:
                    path.unlink()
                    removed.append(path)
            except OSError:
                continue  # another process was faster, or it is not ours to remove
    return removed


def remove_temporaries(path: Path) -> None:
    """Remove what writers of a path left that were killed; nobody may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if _TEMPORARY.fullmatch(temporary.name):
            temporary.unlink(missing_ok=True)


def check_writable(field: str, directory: Path) -> None:
    """Refuse a directory in which nothing can be written; if it is missing, its nearest parent.

    The directory is not made. The UnwritableError names ``field``, the setting.
    """
    with writing(field, directory):
        there = next(path for path in (directory, *directory.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0")
