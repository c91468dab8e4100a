"""Compare a results directory that was disturbed with one that was not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.inputs import FILE
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths


def content(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says, but for when it was computed and how fast."""
    plain: dict[str, Any] = json.loads(json.dumps(record))
    del plain["capmoe"]["checksum"]
    for name in ("date", "seconds"):
        del plain["capmoe"]["provenance"][name]
    return plain


@dataclass(frozen=True)
class Verdict:
    """The faults of a directory; each by its path in it."""

    compared: int  # records that are there
    lost: tuple[str, ...]  # records that are not
    wrong: tuple[str, ...]  # files that are not whole, or say something else
    strays: tuple[str, ...]  # files and directories that an undisturbed run does not leave


class Reference:
    """A directory that nothing disturbed."""

    def __init__(self, root: Path) -> None:
        self._names = _names(root)
        self._records = _contents(root)
        self._inputs = _read(root / FILE)
        self.paths = tuple(self._records)

    def judge(self, root: Path) -> Verdict:
        """Return what differs in a directory whose run has finished."""
        found = _contents(root)
        wrong = [path for path, record in found.items() if record != self._records.get(path)]
        if _read(root / FILE) != self._inputs:
            wrong.append(FILE)
        return Verdict(
            compared=len(found.keys() & self._records.keys()),
            lost=tuple(path for path in self._records if path not in found),
            wrong=tuple(path for path in wrong if path in self._names),
            strays=tuple(sorted(_names(root) - self._names)),
        )


def _names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def _contents(root: Path) -> dict[str, dict[str, Any] | None]:
    """Return what every record of a directory says; None for one that is not whole."""
    found: dict[str, dict[str, Any] | None] = {}
    for path in record_paths(root):
        try:
            record = content(read_record(path, root).content)
        except UsageError:
            record = None
        found[str(path.relative_to(root))] = record
    return found


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
