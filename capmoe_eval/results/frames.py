"""Records as data frames: a row for each cell, and one for each document of each cell."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from pydantic_core import from_json

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.datasource import cache_directory
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.experiment.frame import frame_of
from capmoe_eval.experiment.packs import Pack, has_checksum
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader, record_places

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MIX: Final = "zero_shot_mix"
"""The task whose requests, of four tasks, meet in one batch."""
_VERSION: Final = 1
"""Of the columns of kept documents, which have a folder of their own."""


class Results(NamedTuple):
    """The results of some cells.

    ``cells`` has a row for each cell, with the columns of
    :func:`capmoe_eval.experiment.frame.load_frame` and ``cell``, its digest.

    ``documents`` has a row for each document of each cell, in the cells' order:

    - ``cell``: the digest
    - ``task``: the cell's, or of a mixture of tasks the document's own
    - ``subtask``, and ``asked``, a hash over all its documents: the same numbers name the same
      documents only under the same hash
    - ``document``: its number within the subtask
    - ``unit``: what is sampled: the image that it is about, else the document
    - ``correct``: its score; ``bytes``: its length, if it is a text that a perplexity is of
    - ``batch``: the first that computed it, where it is known
    """

    cells: pd.DataFrame
    documents: pd.DataFrame


def read(*roots: Path | str) -> Results:
    """Return the results in some directories; of a cell in several, those of the first.

    A file that is no whole record is left out, with a warning that names it. The documents of packs
    are kept in the user's cache as Parquet, by the packs' digests.

    Raises:
        UsageError: If there is no whole record.
    """
    broken: list[str] = []
    places = [place for root in roots for place in record_places(Path(root))]
    records = list(Reader().each(places, broken))
    for line in broken:
        warnings.warn(f"left out: {line}", stacklevel=2)
    if not records:
        names = ", ".join(map(str, roots)) or "roots"
        raise UsageError(f"{names}: no whole record; name directories such as results/zoo")
    return results_of(records)


def results_of(records: Iterable[Record]) -> Results:
    """Return the results of some records; of several records of a cell, those of the first."""
    import pandas as pd
    import pyarrow as pa

    by_cell: dict[str, Record] = {}
    for record in records:
        by_cell.setdefault(record.digest, record)
    cells = frame_of((r.summary, r.path, r.path.parents[2]) for r in by_cell.values())
    cells.insert(0, "cell", list(by_cell))
    tables = [_documents(record) for record in by_cell.values()]
    documents = pa.concat_tables(tables or [_table([])]).unify_dictionaries().to_pandas()
    of_cell = np.repeat(np.arange(len(cells)), list(map(len, tables)))
    documents.insert(0, "cell", pd.Categorical.from_codes(of_cell, pd.Index(by_cell)))
    tasks = pd.Categorical(cells["task"])
    task = pd.Series(tasks.take(of_cell))
    if MIX in tasks.categories:
        subtasks = documents["subtask"].cat.categories
        task = task.cat.add_categories(subtasks.difference(tasks.categories))
        task = task.where(task != MIX, documents["subtask"].astype(task.dtype))
    documents.insert(1, "task", task)
    return Results(cells, documents)


def pick(cells: pd.DataFrame, **knobs: object) -> pd.DataFrame:
    """Return the cells that have some values in some columns; None where a cell has no value.

    A list stands for any of its values. A dot in a column's name is two underscores here:
    ``task__fewshot=0``.
    """
    chosen = cells
    for name, value in knobs.items():
        column = chosen[name.replace("__", ".")]
        values = value if isinstance(value, (list, tuple)) else [value]
        chosen = chosen[column.isna() if value is None else column.isin(values)]
    return chosen


def _documents(record: Record) -> pa.Table:
    """Return the documents of a record, from the kept ones of its pack or from its file."""
    if record.pack is None:
        return _table([{name: vars(part) for name, part in record.documents.items()}])
    table, places = _of_pack(record.pack)
    return table.slice(*places[record.path.name])


@functools.lru_cache(maxsize=1024)
def _of_pack(pack: Pack) -> tuple[pa.Table, Mapping[str, tuple[int, int]]]:
    """Return the documents of all records of a pack, and the first and number of each's rows."""
    import pyarrow as pa
    from pyarrow import parquet

    counts = [summary["n"] for summary in pack.summaries.values()]
    starts = np.cumsum([0, *counts]).tolist()
    places = dict(zip(pack.summaries, zip(starts, counts, strict=False), strict=True))
    file = cache_directory() / f"documents-{_VERSION}" / f"{pack.digest}.parquet"
    try:
        table = parquet.read_table(file, memory_map=False)
    except (OSError, pa.ArrowInvalid):  # absent, or damaged
        table = _table(_unpacked(pack))
        with whole_file(file, durable=False) as stream:
            parquet.write_table(table, stream, compression="zstd")
    if len(table) != starts[-1]:
        raise UsageError(f"{pack.path}: n of its records is not the number of their documents")
    return table, places


def _unpacked(pack: Pack) -> Iterator[Mapping[str, Mapping[str, Any]]]:
    """Yield the answers of each record of a pack, by subtask."""
    for name, summary in pack.summaries.items():
        data = pack.record(name)
        if not has_checksum(data, summary["checksum"]):
            raise UsageError(f"{pack.path}: the checksum of {name} is another than the pack says")
        yield from_json(data)["capmoe"]["documents"]


def _table(records: Iterable[Mapping[str, Mapping[str, Any]]]) -> pa.Table:
    """Return the documents of some records, in their order, each by subtask."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {"subtask": [], "asked": []}
    columns |= {"document": [], "unit": [], "correct": [], "bytes": [], "batch": []}
    for record in records:
        are_images = all(part.get("images") is not None for part in record.values())
        for name, part in sorted(record.items()):
            count = len(part["correct"])
            columns["subtask"] += [name] * count
            columns["asked"] += [part["documents"]] * count
            columns["document"] += range(count)
            columns["unit"] += part["images"] if are_images else range(count)
            columns["correct"] += part["correct"]
            columns["bytes"] += part.get("bytes") or [None] * count
            columns["batch"] += part.get("batches") or [None] * count
    text = pa.dictionary(pa.int32(), pa.string())
    kinds = (text, text, pa.int32(), pa.int32(), pa.float64(), pa.float64(), pa.int32())
    return pa.table(columns, schema=pa.schema(zip(columns, kinds, strict=True)))
