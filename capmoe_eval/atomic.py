"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from capmoe_eval.errors import writing


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``; whoever reads, whenever killed, finds the old or the new file.

    The data goes to a temporary file in the same directory, is flushed to the disk and renamed.

    Args:
        path: The file to write; missing parent directories are created.
        data: The whole content.

    Raises:
        OSError: If the directory cannot be written. Nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; results are as readable as any other file of the user.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def check_writable(field: str, directory: Path) -> None:
    """Refuse a directory in which nothing can be written, before anything is computed for it.

    Nothing is made: where it is not there, its nearest parent that is there is tried.

    Args:
        field: The setting that names the directory.
        directory: There or not.

    Raises:
        UnwritableError: If it cannot be written.
    """
    with writing(field, directory):
        there = next(path for path in (directory, *directory.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
