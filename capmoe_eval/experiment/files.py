"""Files that are written whole or not at all, and the YAML files that are data of the package."""

import errno
import glob
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from capmoe_eval.errors import UsageError, shown, writing

_T = TypeVar("_T")
_TEMPORARY = re.compile(r"\..+?(\.[0-9]{1,9})?\.[a-z0-9_]{8}\.tmp")
"""The name of a temporary file: the file's own, the process (not in old ones), eight characters."""
_LONGEST_PART: Final = 200
"""Bytes of a file's name that its temporary file's has; a file system takes 255 for all of it."""


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends, and not at all if it raises.

    It is a temporary file in the same directory, flushed to the disk and renamed. Missing parent
    directories are created, and removed again if the block raises. Without ``durable`` nothing
    waits for the disk, and a power failure may leave an empty file.

    A link stays: the file that it names is replaced.

    Raises:
        OSError: Also if ``path`` is there and no regular file.
    """
    place = _place(path)
    name = os.fsencode(place.name)[:_LONGEST_PART].decode(errors="ignore")
    temporary = place.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    missing = [parent for parent in place.parents if not parent.exists()]
    try:
        if place is path:  # of what a link names, nobody has said that it may be created
            place.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(place)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        for parent in missing:
            with suppress(OSError):  # another process has written to it
                parent.rmdir()
        raise
    if durable:  # the directory, too, which has the new name, where the file system does that
        with suppress(OSError):
            number = os.open(place.parent, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def _place(path: Path) -> Path:
    """Return the path of the file that a path names: itself, or the end of a chain of links.

    Raises:
        OSError: If something else than a file is there.
    """
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return place
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return place


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; a pipe may never end, and a device never does.

    Raises:
        OSError: Also for whatever else is there.
    """
    # Without blocking, since it would wait for the writer of a pipe.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return file.read()


def read_yaml(text: str) -> Any:
    """Return the content of YAML text."""
    import yaml

    # The C loader where there is one: the pure one takes most of a command's time.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_data(package: str, name: str, kind: type[_T]) -> _T:
    """Return the content of a file of a package as a type, which refuses unknown fields.

    Raises:
        pydantic.ValidationError: If the content does not fit.
    """
    from pydantic import ConfigDict, TypeAdapter

    content = read_yaml((resources.files(package) / name).read_text(encoding="utf-8"))
    # In a tuple, since a bare dataclass takes no configuration.
    adapter = TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]
    data: _T = adapter.validate_python((content,))[0]
    return data


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``data``; a reader always finds the whole old or the whole new file.

    See :func:`whole_file`; of an OSError nothing is left behind.
    """
    with whole_file(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def remove_temporaries(path: Path) -> None:
    """Remove what writers of a path left that were killed; nobody may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if _TEMPORARY.fullmatch(temporary.name):
            temporary.unlink(missing_ok=True)


def check_file(field: str, path: Path) -> None:
    """Refuse the path of a file that :func:`whole_file` cannot write; nothing is made.

    The UsageError names ``field``, the setting.
    """
    with writing(field, path):
        place = _place(path)
    check_writable(field, path, place.parent)


def check_writable(field: str, path: Path, directory: Path | None = None) -> None:
    """Refuse a directory in which nothing can be written; if it is missing, its nearest parent.

    The directory is ``path``, or that of the file ``path``. It is not made. A missing directory at
    the top of the machine is a typing error, such as of the name of a mounted disk, unless it is
    itself the directory that is asked for. The UsageError names ``field``, the setting.
    """
    directory = path if directory is None else directory
    with writing(field, path):
        missing = []
        for there in (directory, *directory.parents):
            if os.path.lexists(there):
                break
            missing.append(there)
        if missing and missing[-1].is_absolute() and missing[-1] != path:
            top = missing[-1]
            if top.parent == Path(top.anchor):
                raise UsageError(
                    f"{field}={shown(path)}: there is no {top}; make it with mkdir, or correct the "
                    "path"
                )
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0")
        longest = os.pathconf(there, "PC_NAME_MAX")
        if any(len(os.fsencode(part.name)) > longest for part in (path, *missing)):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def with_imported(file: Path) -> set[Path]:
    """Return a module's file, and those that it imports from its own directory, which is a user's.

    One that is no Python is a SyntaxError.
    """
    installed = file.parent.name in ("site-packages", "dist-packages")
    finder = ModuleFinder([] if installed else [str(file.parent)], excludes=["capmoe_eval"])
    finder.run_script(str(file))
    modules = map(vars, finder.modules.values())
    return {Path(module["__file__"]) for module in modules if module["__file__"]}
