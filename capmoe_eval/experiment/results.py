"""A results directory: the one reader of its records, also as a pandas data frame.

A user's own results lie apart from those of the repository: ``results/local-zoo``, which git
ignores, is read together with ``results/zoo``, and it alone is written.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import CELL_FIELDS, ModelId, TaskId
from capmoe_eval.experiment.record import NotRegisteredError, Record, read_record
from capmoe_eval.routing.factor import factor_forms
from capmoe_eval.routing.registry import knobs

if TYPE_CHECKING:
    import pandas as pd


CALIBRATIONS: Final = "calibration"
"""The folder, beside those of a model's tasks, of what gamma=adaptive chooses from."""


LOCAL: Final = "local-"
"""How the name of a directory of a user's own results begins; the shipped one's name follows."""


@dataclass(frozen=True)
class Results:
    """Records that were read."""

    records: tuple[Record, ...]  # the valid ones
    broken: tuple[str, ...]  # one line for each other file, which names the file and the fix


class Reader:
    """Reads each whole record once and keeps it, some 110 KiB of memory."""

    def __init__(self) -> None:
        self._known: dict[Path, Record] = {}

    def all(self, places: Iterable[tuple[Path, Path]]) -> Results:
        """Return the records at some paths, each with its results directory, in their order."""
        broken: list[str] = []
        collects = gc.isenabled()
        gc.disable()  # it would go through all records again and again, in vain
        try:
            records = tuple(self.each(places, broken, keep=True))
        finally:
            if collects:
                gc.enable()
        return Results(records, tuple(broken))

    def each(
        self, places: Iterable[tuple[Path, Path]], broken: list[str], *, keep: bool = False
    ) -> Iterator[Record]:
        """Yield the records at some paths, each with its results directory, in their order.

        ``broken`` receives a line for each file that is no whole record, and one for all records of
        methods that are not registered. Unless records are kept, memory holds one at a time, and
        those that were kept before.
        """
        missing: Counter[str] = Counter()
        for path, root in places:
            try:
                record = self._known.get(path) or read_record(path, root)
            except NotRegisteredError as error:
                missing[error.missing] += 1
                continue
            except UsageError as error:
                broken.append(str(error))
                continue
            if keep:
                self._known[path] = record
            yield record
        if missing:
            names = ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()))
            broken.append(
                f"records of what is not registered: {names}; install the packages that have it, "
                "or delete these records"
            )


def directories(root: Path) -> tuple[Path, ...]:
    """Return the directories that are read for a results directory: itself, then the shipped one.

    ``results/local-zoo`` has ``results/zoo`` beside it; every other directory stands alone.
    """
    name = root.name.removeprefix(LOCAL)
    return (root,) if name in ("", root.name) else (root, root.with_name(name))


def stored(root: Path, path: Path) -> tuple[Path, Path] | None:
    """Return the path and results directory of a file of ``root``; None if there is no such file.

    A user's own file goes before the shipped one.
    """
    for directory in directories(root):
        if (file := directory / path.relative_to(root)).exists():
            return file, directory
    return None


def record_paths(root: Path) -> list[Path]:
    """Return the paths of all record files of a results directory, sorted.

    They are exactly ``<root>/<model>/<task>/*.json`` without hidden files; a model's calibrations
    lie beside its tasks.
    """
    found = (path for path in root.glob("*/*/*.json") if path.parent.name != CALIBRATIONS)
    return sorted(path for path in found if not path.name.startswith("."))


def record_places(root: Path) -> list[tuple[Path, Path]]:
    """Return path and directory of all records that are read for a results directory, sorted.

    Of a cell that was computed again the user's own record counts: it replaces a shipped one only
    where ``overwrite=true`` asked for it.
    """
    places = {
        path.relative_to(directory): (path, directory)
        for directory in reversed(directories(root))
        for path in record_paths(directory)
    }
    return [places[name] for name in sorted(places)]


def read_results(root: Path, reader: Reader | None = None) -> Results:
    """Read every record of a results directory; a shared reader reads none of them twice."""
    return (reader or Reader()).all(record_places(root))


def each_record(root: Path, broken: list[str]) -> Iterator[Record]:
    """Yield every record of a results directory and keep none, as :meth:`Reader.each`."""
    return Reader().each(record_places(root), broken)


def result_directories(root: Path) -> list[Path]:
    """Return the results directories among a directory and those directly below it.

    A directory below counts if it has records and is not a model's directory of ``root`` itself.
    A shipped one is left out if it is read with the user's own.
    """
    below = [path for path in sorted(root.glob("*/")) if not any(path.glob("*/*.json"))]
    there = [path for path in (root, *below) if record_paths(path)]
    read = {shipped for path in there for shipped in directories(path)[1:]}
    return [path for path in there if path not in read]


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


_OF_PARTS: Final = {
    "model": {f"model.{name}".removesuffix(".name"): name for name in _names(ModelId)},
    "task": {f"task.{name}".removesuffix(".name"): name for name in _names(TaskId)},
}
_KNOBS: Final = tuple(knobs())  # of all methods and forms of γ, which are registered now
_OF_THE_PAPER: Final = (
    *("method", "gamma", "ep_size", "scope", "candidates", "m", "protect_topk", "max_k", "rounds"),
    *("granularity", "placement", "rounding", "count_padding", "decode", "renormalize"),
    *("modality", "seed"),
)
_OF_FACTORS: Final = tuple(knob for form in factor_forms() for knob in form.knobs)
_OF_METHOD: Final = (
    *_OF_THE_PAPER,
    *(knob for knob in _KNOBS if knob not in (*_OF_THE_PAPER, *_OF_FACTORS)),
    *_OF_FACTORS,
)
IDENTITY: Final = (*_OF_PARTS["model"], *_OF_METHOD, *_OF_PARTS["task"], *CELL_FIELDS)
"""The columns that tell cells apart: ``model``, ``model.revision``, ``task``, ``task.fewshot``, the
method's knobs and the evaluation's, such as ``gamma`` and ``batch_size``."""


def load_frame(root: Path | str) -> pd.DataFrame:
    """Return one row per record of a results directory, in the order of their paths.

    The first columns are :data:`IDENTITY`, every field of a cell's identity: two cells differ in
    one of them at least. A field is missing where it has no effect, such as ``gamma`` where the
    method has none. The others are ``label`` (the method and its knobs), ``value`` and ``stderr``
    (fractions), ``n`` (documents), ``drop_rate``, ``pad_waste``, ``effective_gamma`` (capacity over
    the mean load; missing without a capacity), ``peak_before``, ``peak_after`` (highest expert load
    over the mean), ``proven`` (no invariant failed), ``examined`` (the share of the forwards that
    an independent check examined; missing in records from before it), ``seconds``, ``results_dir``
    and ``path``.

    A file that is no whole record is left out, with a warning that names it; so are all records of
    methods that are not registered, with a warning that counts them. ``root`` is the
    directory of a profile (``results/zoo``, and with the user's own ``results/local-zoo``), or of
    several (``results``).

    Raises:
        UsageError: If there is no such directory, or no whole record in it.
    """
    import pandas as pd

    root, rows, refused = Path(root), [], list[str]()
    for directory in result_directories(root):
        broken: list[str] = []
        rows += [_row(record) for record in each_record(directory, broken)]
        refused += broken
    if not rows:
        wrong = "has no whole record" if root.is_dir() else "no such directory"
        raise UsageError(
            f"{root}: {wrong}; name the directory of a profile, such as results/zoo, or of "
            "several, such as results"
        )
    for line in refused:
        warnings.warn(f"left out: {line}", stacklevel=2)
    columns = dict.fromkeys((*IDENTITY, *itertools.chain.from_iterable(rows)))
    return pd.DataFrame(rows, columns=list(columns))


def _row(record: Record) -> dict[str, object]:
    cell = record.cell
    method = cell.method.identity()
    if "gamma" in method:
        method["gamma"] = record.gamma
    if "layer_gammas" in method:
        method["layer_gammas"] = tuple(map(float, method["layer_gammas"]))
    parts = {
        column: getattr(getattr(cell, part), name)
        for part, columns in _OF_PARTS.items()
        for column, name in columns.items()
    }
    return {
        **parts,
        **method,
        **{name: getattr(cell, name) for name in CELL_FIELDS},
        "label": cell.label,
        "value": record.value,
        "stderr": record.stderr,
        "n": record.n,
        "drop_rate": record.load.drop_rate,
        "pad_waste": record.load.pad_waste,
        "effective_gamma": record.load.effective_gamma,
        "peak_before": record.load.peak_before,
        "peak_after": record.load.peak_after,
        "proven": not record.proofs.broken,
        "examined": record.proofs.examined,
        "seconds": record.provenance.seconds,
        "results_dir": str(record.path.parents[2]),
        "path": str(record.path),
    }
