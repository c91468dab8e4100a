"""A results directory: which files are its records, and the one reader of them.

Every table, figure, claim and page reads records through here, so all of them take and refuse the
same files, in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capmoe_eval.errors import UsageError
from capmoe_eval.record import Record, read_record


class Reader:
    """Reads each record once, whatever the number of tables that show it."""

    def __init__(self) -> None:
        self._known: dict[Path, Record | UsageError] = {}

    def __call__(self, path: Path, root: Path) -> Record:
        """Return the record at a path of a results directory.

        Raises:
            UsageError: If it is no whole record of its place; see :func:`read_record`.
        """
        if path not in self._known:
            try:
                self._known[path] = read_record(path, root)
            except UsageError as error:
                self._known[path] = error
        found = self._known[path]
        if isinstance(found, UsageError):
            raise found
        return found


@dataclass(frozen=True)
class Results:
    """What a results directory holds.

    Attributes:
        records: Its whole records, in the order of their paths.
        broken: One line for each file that is none; it names the file and what to do.
    """

    records: tuple[Record, ...] = ()
    broken: tuple[str, ...] = ()


def record_paths(root: Path) -> list[Path]:
    """Return the files of a results directory that should be records, sorted.

    They are exactly ``<root>/<model>/<task>/*.json``; hidden files are left out.
    """
    return sorted(path for path in root.glob("*/*/*.json") if not path.name.startswith("."))


def read_results(root: Path, reader: Reader | None = None) -> Results:
    """Read every record of a results directory; what is broken is listed and left out.

    Args:
        root: The directory, as ``results_dir`` of an evaluation.
        reader: Reads the records; shared, it reads none of them twice.
    """
    reader = reader or Reader()
    records, broken = [], []
    for path in record_paths(root):
        try:
            records.append(reader(path, root))
        except UsageError as error:
            broken.append(str(error))
    return Results(tuple(records), tuple(broken))


def result_directories(root: Path) -> list[Path]:
    """Return the results directories at and below a directory: itself, or one for each profile.

    A directory below it is one of its own if it has records, and is no model of ``root``.
    """
    below = [path for path in sorted(root.glob("*/")) if not any(path.glob("*/*.json"))]
    return [path for path in (root, *below) if record_paths(path)]
