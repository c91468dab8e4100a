"""lm-eval's index of its tasks, read from a file when nothing has changed.

Building it parses some 14,000 YAML files, which takes longer than evaluating a small model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.tasks.manager
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from capmoe_eval.atomic import write_text
from capmoe_eval.datasource import cache_directory

_FORMAT = 1


def task_manager(include: Iterable[Path]) -> TaskManager:
    """Return lm-eval's task manager over its own tasks and those of further directories.

    It is what ``TaskManager(include_path=...)`` returns, but an entry's configuration is not in the
    index: lm-eval reads it from the task's file again whenever it builds one.

    Args:
        include: Directories with task files; a later one's tasks replace an earlier one's.
    """
    # A manager builds its index itself and cannot be given one.
    with mock.patch.object(lm_eval.tasks.manager, "TaskIndex", _KeptIndex):
        return TaskManager(include_path=[str(path) for path in include])


class _KeptIndex(TaskIndex):
    @staticmethod
    def build(paths: Iterable[Path], *, resolve_includes: bool = True) -> dict[str, Entry]:
        del resolve_includes  # of what is not in the index
        index: dict[str, Entry] = {}
        for root in paths:
            index |= kept_index(root)
        return index


def kept_index(root: Path) -> dict[str, Entry]:
    """Return the index of a directory's tasks, from the cache if no file below it has changed."""
    return _read(root) or _build(root)


def _build(root: Path) -> dict[str, Entry]:
    """Return the index of a directory, and keep it for the next process."""
    index: dict[str, Entry] = TaskIndex.build([root])
    for entry in index.values():
        entry.cfg = None  # as it comes out of the file
    entries = {
        name: [
            entry.kind.name,
            None if entry.yaml_path is None else str(entry.yaml_path),
            sorted(entry.tags),
        ]
        for name, entry in index.items()
    }
    content = {"fingerprint": _fingerprint(root), "entries": entries}
    with contextlib.suppress(OSError):  # a cache that cannot be written is no mistake
        write_text(_path(root), json.dumps(content))
    return index


def _path(root: Path) -> Path:
    name = hashlib.blake2b(str(root.resolve()).encode(), digest_size=8).hexdigest()
    return cache_directory() / "tasks" / f"{name}.json"


def _read(root: Path) -> dict[str, Entry] | None:
    """Return the index of a directory as it was kept, or None if it must be built."""
    try:
        content: dict[str, Any] = json.loads(_path(root).read_text())
        if content["fingerprint"] != _fingerprint(root):
            return None
        return {
            name: Entry(name, Kind[kind], None if path is None else Path(path), None, set(tags))
            for name, (kind, path, tags) in content["entries"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fingerprint(root: Path) -> str:
    """Return a hash that changes when a file below the directory does, or lm-eval itself."""
    digest = hashlib.blake2b(f"{_FORMAT} {version('lm_eval')} {root.resolve()}".encode())
    for path, size, changed in sorted(_files(str(root))):
        digest.update(f"{path} {size} {changed}\n".encode())
    return digest.hexdigest()


def _files(directory: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path)
            else:
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns
