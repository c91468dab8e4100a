"""The file of a replication's records: what each contrast was computed from, a line each.

A row has ``claim`` (its letter, or the label of a row of the gaps), ``label``, ``effect``, and
``files``: the names of its records by the pack that has them, or a record's own file with none.
Paths are as seen from the directory of the file.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from capmoe_eval.experiment.packs import SUFFIX, pack_path

RECORDS: Final = "replication.records.json"
"""Its name, beside replication.md."""


def file_with(record: Path) -> Path:
    """Return the file that has a record: its own, or its pack where that is missing."""
    pack = pack_path(record)
    return record if record.exists() or not pack.exists() else pack


def record_row(
    claim: str, label: str, effect: float, paths: Iterable[str], folder: Path
) -> dict[str, Any]:
    """Return the row of a contrast of records at some paths, as seen from a directory."""
    files: dict[str, list[str]] = {}
    for path in map(Path, paths):
        file = file_with(path)
        names = files.setdefault(seen_from(folder, file), [])
        if file != path:
            names.append(path.stem)
    return {"claim": claim, "label": label, "effect": round(effect, 5), "files": files}


def paths_of(row: Mapping[str, Any]) -> list[Path]:
    """Return the paths of a row's records, as if none were packed."""
    return [
        Path(file.removesuffix(SUFFIX), f"{name}.json") if file.endswith(SUFFIX) else Path(file)
        for file, names in row["files"].items()
        for name in names or [""]
    ]


def to_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a file, with a line for each row that a link can name."""
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def line_numbers(rows: Sequence[Mapping[str, Any]]) -> Mapping[tuple[str, str], int]:
    """Return the number of each row's line, by its claim and its label."""
    return {(row["claim"], row["label"]): line for line, row in enumerate(rows, 2)}


def seen_from(folder: Path, path: Path | str) -> str:
    """Return a path as seen from a directory, with forward slashes."""
    return Path(os.path.relpath(path, folder)).as_posix()
