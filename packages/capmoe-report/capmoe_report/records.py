"""The file of a replication's records: what each contrast was computed from, a line each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from capmoe_eval.experiment.packs import SUFFIX, file_with
from pydantic import BaseModel, RootModel

from capmoe_report.verdicts import VerdictFile

RECORDS: Final = "replication.records.json"
"""Its name, beside replication.md."""


class ContrastRecords(BaseModel):
    """The records of a contrast by their file: a pack, of which they have a name, or their own."""

    claim: str  # letter of the claim, or the label of a row of the gaps
    label: str
    effect: float
    files: dict[str, list[str]]  # paths as seen from the directory of this file

    @property
    def paths(self) -> list[Path]:
        """The paths of the records, as if none were packed."""
        return [
            Path(file.removesuffix(SUFFIX), f"{name}.json") if file.endswith(SUFFIX) else Path(file)
            for file, names in self.files.items()
            for name in names or [""]
        ]


class ContrastFile(RootModel[tuple[ContrastRecords, ...]]):
    """The whole file."""

    def lines(self) -> Mapping[tuple[str, str], int]:
        """Return the number of each contrast's line, by its claim and its label."""
        return {(each.claim, each.label): line for line, each in enumerate(self.root, 2)}

    def to_json(self) -> str:
        """Return the file's text, with a line for each contrast that a link can name."""
        lines = ",\n".join(contrast.model_dump_json() for contrast in self.root)
        return f"[\n{lines}\n]\n"


def contrast_records(file: VerdictFile, folder: Path) -> ContrastFile:
    """Return the records of all contrasts with an effect, as seen from a directory."""
    contrasts = [(claim.id, finding) for claim in file.claims for finding in claim.contrasts]
    contrasts += [(row.label, gap) for row in file.grouping for gap in row.gaps]
    return ContrastFile(
        tuple(
            ContrastRecords(
                claim=claim,
                label=finding.label,
                effect=round(finding.effect, 5),
                files=by_file(finding.records, folder),
            )
            for claim, finding in contrasts
            if finding.effect is not None and finding.records
        )
    )


def by_file(paths: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Return the names of records by the file that has them, as seen from a directory."""
    files: dict[str, list[str]] = {}
    for path in map(Path, paths):
        file = file_with(path)
        names = files.setdefault(seen_from(folder, file), [])
        if file != path:
            names.append(path.stem)
    return files


def seen_from(folder: Path, path: Path | str) -> str:
    """Return a path as seen from a directory, with forward slashes."""
    return Path(os.path.relpath(path, folder)).as_posix()
