"""Sources of evaluation documents: the hub, embedded, or a local directory."""

import atexit
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from capmoe_eval.errors import UnwritableError, UsageError
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.names import split_world

HUB = "hub"
DIRECTORY = "DIRECTORY"
"""Stands for a directory that a printed command does not name, and that commands refuse."""
EMBEDDED = ("miniworld", "banking77", "pictures", "easy_vqa")
"""Sources that come with the suite: generated, the real BANKING77, and easy-VQA by its package.

``miniworld_w8`` is the mini-world of seed 8 (:func:`is_embedded`)."""


def is_embedded(name: str) -> bool:
    """Return whether a source comes with the suite."""
    base, world = split_world(name)
    return name in EMBEDDED or (base == "miniworld" and world is not None)


@dataclass(frozen=True)
class DataSource:
    """A source of evaluation sets."""

    name: str  # ``hub``, an embedded source, or the name of a local root in results
    # The directory in hub layout, with ``<org>/<dataset>/README.md`` (a ``configs:`` header) and
    # parquet files beside it; None for the hub.
    root: Path | None = None
    file: Path | None = None  # of a user's own task
    file_hash: str | None = None  # of that file, and of those that it needs, in the cell

    def directory(self, dataset: str) -> Path | None:
        """Return the directory of a dataset, None for the hub; UsageError if it is not there."""
        if self.root is None:
            if self.name != HUB:
                raise UsageError(f"data.name={self.name}: no directory has it; set data.root=DIR")
            return None
        directory = self.root / dataset
        if not (directory / "README.md").is_file():
            present = sorted(
                str(card.parent.relative_to(self.root)) for card in self.root.glob("*/*/README.md")
            )
            raise UsageError(
                f"data.root={self.root}: no dataset {dataset!r} (no {dataset}/README.md); it has "
                f"{', '.join(present) or 'none'}; add it, or set data.root=null to use the hub"
            )
        return directory

    def fingerprint(self, dataset: str, *, anew: bool = False) -> str | None:
        """Return a hash of a dataset's files, or of several joined by ``+``; None for the hub.

        Files are read once in a process, unless ``anew``.
        """
        hashed = _hash_files.__wrapped__ if anew else _hash_files
        directories = [self.directory(name.strip()) for name in dataset.split("+")]
        return "+".join(hashed(directory) for directory in directories if directory) or None


@functools.cache
def _hash_files(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(directory)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def users_cache() -> Path:
    """Return the suite's directory in the user's cache; it may not exist or not be writable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capmoe_eval"


def cache_directory() -> Path:
    """Return the directory for files that the suite can generate again.

    Where the user's cache cannot be written, it is a temporary directory that is deleted when the
    process ends, and a line on standard error says so once.
    """
    return _writable_or_temporary(users_cache())


@functools.cache
def _writable_or_temporary(directory: Path) -> Path:
    try:
        check_writable("XDG_CACHE_HOME", directory)
    except UnwritableError as error:
        print(f"note: {error}; until then every run makes anew what it holds", file=sys.stderr)
        directory = Path(tempfile.mkdtemp(prefix="capmoe_eval-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def data_source(root: str | None, name: str | None = None) -> DataSource:
    """Return the source for ``data.root`` and ``data.name``; a name alone can be read of records.

    Args:
        root: None for the hub, an embedded source, or a directory; UsageError if it is none.
            With a name it may also be :data:`DIRECTORY`.
        name: Name of a local root in results. By default it is the directory's name, with
            ``local-`` before it if it is ``hub`` or the name of an embedded source.
    """
    if root is None or (name and root == DIRECTORY):
        return DataSource(name or HUB)
    if is_embedded(root):
        if name not in (None, root):
            raise UsageError(f"data.name={name}: data.root={root} has its own name; leave it out")
        return DataSource(root, Path(root))
    path = Path(root).expanduser().resolve()
    if not path.is_dir():
        raise UsageError(
            f"data.root={root}: no such directory; give one in hub layout, "
            f"{', '.join(EMBEDDED)}, or null for the hub"
        )
    default_name = f"local-{path.name}" if path.name == HUB or is_embedded(path.name) else path.name
    return DataSource(name or default_name, path)
