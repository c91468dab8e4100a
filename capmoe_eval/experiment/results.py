"""List and read the records of a results directory.

Every table, figure, claim and page reads records with this module, so that all of them accept and
refuse the same files, with the same messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record, read_record


class Reader:
    """Reads each record once and keeps it."""

    def __init__(self) -> None:
        self._known: dict[Path, Record | UsageError] = {}

    def __call__(self, path: Path, root: Path) -> Record:
        """Return the record at a path of a results directory.

        Raises:
            UsageError: If the file is not a whole record or lies in the wrong place; see
                :func:`read_record`.
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
    """The content of a results directory.

    Attributes:
        records: Its valid records, in the order of their paths.
        broken: One line for each other file, which names the file and what to do.
    """

    records: tuple[Record, ...] = ()
    broken: tuple[str, ...] = ()


def record_paths(root: Path) -> list[Path]:
    """Return the paths of all record files of a results directory, sorted.

    They are exactly ``<root>/<model>/<task>/*.json`` without hidden files.
    """
    return sorted(path for path in root.glob("*/*/*.json") if not path.name.startswith("."))


def read_results(root: Path, reader: Reader | None = None) -> Results:
    """Read every record of a results directory.

    Args:
        root: The directory, as ``results_dir`` of an evaluation.
        reader: The reader; pass a shared one to read no record twice.

    Returns:
        The valid records, and a line for each file that is not one.
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
    """Return the results directories among a directory and those directly below it.

    A directory below counts if it has records and is not a model's directory of ``root`` itself.
    """
    below = [path for path in sorted(root.glob("*/")) if not any(path.glob("*/*.json"))]
    return [path for path in (root, *below) if record_paths(path)]
