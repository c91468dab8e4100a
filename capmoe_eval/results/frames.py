"""Records as data frames: a row for each cell, for each of its documents and of its MoE layers."""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_origin

import numpy as np
from pydantic_core import from_json

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.datasource import cache_directory
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.experiment.frame import frame_of
from capmoe_eval.experiment.packs import Pack, has_checksum
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Layer, Load, Part
from capmoe_eval.experiment.results import Reader, record_places

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MIX: Final = "zero_shot_mix"
"""The task whose requests, of four tasks, meet in one batch."""
_VERSION: Final = 2
"""Of the columns of kept documents and layers, which have a folder of their own."""


class Results(NamedTuple):
    """The results of some cells.

    ``cells`` has a row for each cell, with the columns of
    :func:`capmoe_eval.experiment.frame.load_frame` and

    - ``cell``: the digest
    - ``setting``: the method with all its knobs but the seed (:func:`setting`)
    - ``load.…``: the record's further statistics over all layers, such as ``load.mean_load`` and
      ``load.modalities.text.drop_rate``

    ``documents`` has a row for each document of each cell, in the cells' order:

    - ``cell``: the digest
    - ``task``: the cell's, or of a mixture of tasks the document's own
    - ``subtask``, and ``asked``, a hash over all its documents: the same numbers name the same
      documents only under the same hash
    - ``document``: its number within the subtask
    - ``unit``: what is sampled: the image that it is about, else the document
    - ``correct``: its score; ``bytes``: its length, if it is a text that a perplexity is of
    - ``batch``: the first that computed it, where it is known

    ``layers`` has a row for each MoE layer of each cell, in the cells' order: ``cell``, ``layer``,
    its number from 0, and the fields of :class:`capmoe_eval.experiment.record_part.Layer`, a dot
    for each level, such as ``peak.expert_before.mean``. Lists have a number for each expert
    (``load_before``, ``score_by_rank``), or for each γ (``grid.gamma``, ``grid.drop_rate``):
    ``layers.explode(["load_before", "load_after"])`` has a row for each expert.
    """

    cells: pd.DataFrame
    documents: pd.DataFrame
    layers: pd.DataFrame


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


def results_of(records: Iterable[Record], metric: str = "") -> Results:
    """Return the results of some records; of several records of a cell, those of the first.

    Args:
        records: Of any cells.
        metric: Of which the values and documents are, as lm-eval names it; empty for each task's
            own. A record without it is a UsageError.
    """
    import pandas as pd
    import pyarrow as pa

    by_cell: dict[str, Record] = {}
    for record in records:
        by_cell.setdefault(record.digest, record)
    cells = frame_of((r.summary, r.path, r.path.parents[2]) for r in by_cell.values())
    cells.insert(0, "cell", list(by_cell))
    methods = (record.identity["method"] for record in by_cell.values())
    cells.insert(1, "setting", [setting(method) for method in methods])
    loads = pd.DataFrame((_flat(r.summary["load"], "load") for r in by_cell.values()), cells.index)
    loads = loads.reindex(columns=[*dict.fromkeys((*_names(Load, "load"), *loads))])
    cells = cells.join(loads.drop(columns=[f"load.{name}" for name in cells], errors="ignore"))
    parts = [_parts(record) for record in by_cell.values()]
    tables, of_layers = ([part[place] for part in parts] for place in (0, 1))
    if metric:
        scores = [record.score(metric) for record in by_cell.values()]
        for name in ("value", "stderr", "n"):
            cells[name] = [getattr(score, name) for score in scores]
        answers = [{name: vars(part) for name, part in s.documents.items()} for s in scores]
        tables = [_table([answer]) for answer in answers]
    documents = pa.concat_tables(tables or [_table([])]).unify_dictionaries().to_pandas()
    of_cell = np.repeat(np.arange(len(cells)), list(map(len, tables)))
    documents.insert(0, "cell", pd.Categorical.from_codes(of_cell, pd.Index(by_cell)))
    # Fields that some records lack, and lists in which all numbers are missing.
    layers = pa.concat_tables([_layers([]), *of_layers], promote_options="permissive").to_pandas()
    layers.insert(0, "cell", np.repeat(list(by_cell), list(map(len, of_layers))))
    tasks = pd.Categorical(cells["task"])
    task = pd.Series(tasks.take(of_cell))
    if MIX in tasks.categories:
        subtasks = documents["subtask"].cat.categories
        task = task.cat.add_categories(subtasks.difference(tasks.categories))
        task = task.where(task != MIX, documents["subtask"].astype(task.dtype))
    documents.insert(1, "task", task)
    return Results(cells, documents, layers)


def setting(method: Mapping[str, object]) -> str:
    """Return a method's identity without its seed, by which cells of one setting are picked."""
    return json.dumps({name: value for name, value in method.items() if name != "seed"})


def pick(cells: pd.DataFrame, **knobs: object) -> pd.DataFrame:
    """Return the cells that have some values in some columns; None where a cell has no value.

    A list stands for any of its values. A dot in a column's name is two underscores here:
    ``task__fewshot=0``.
    """
    chosen = np.ones(len(cells), dtype=bool)
    for name, value in knobs.items():
        column = cells[name.replace("__", ".")]
        values = value if isinstance(value, (list, tuple)) else [value]
        chosen &= (column.isna() if value is None else column.isin(values)).to_numpy(dtype=bool)
    return cells[chosen]


class _OfPack(NamedTuple):
    documents: pa.Table
    layers: pa.Table
    # Of each record the first and the number of its rows in both.
    places: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]


def _parts(record: Record) -> tuple[pa.Table, pa.Table]:
    """Return the documents and layers of a record, from those kept of its pack or its file."""
    if record.pack is None:
        part = record.capmoe
        return _table([part["documents"]]), _layers([part["layers"]])
    kept = _of_pack(record.pack)
    documents, layers = kept.places[record.path.name]
    return kept.documents.slice(*documents), kept.layers.slice(*layers)


@functools.lru_cache(maxsize=1024)
def _of_pack(pack: Pack) -> _OfPack:
    """Return the documents and layers of all records of a pack."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = cache_directory() / f"frames-{_VERSION}"
    files = [folder / f"{pack.digest}.{name}.parquet" for name in ("documents", "layers")]
    try:
        tables = [parquet.read_table(file, memory_map=False) for file in files]
    except (OSError, pa.ArrowInvalid):  # absent, or damaged
        records = list(_unpacked(pack))
        tables = [_table(r["documents"] for r in records), _layers(r["layers"] for r in records)]
        for file, table in zip(files, tables, strict=True):
            with whole_file(file, durable=False) as stream:
                parquet.write_table(table, stream, compression="zstd")
    documents, layers = tables
    counts = [summary["n"] for summary in pack.summaries.values()]
    ends = np.cumsum(counts).tolist()
    first = [i for i, number in enumerate(layers["layer"].to_pylist()) if number == 0]
    sizes = np.diff([*first, len(layers)]).tolist()
    if len(documents) != ends[-1] or len(first) != len(counts):
        raise UsageError(f"{pack.path}: n of its records is not the number of their documents")
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    places = zip(zip(starts, counts, strict=True), zip(first, sizes, strict=True), strict=True)
    return _OfPack(documents, layers, dict(zip(pack.summaries, places, strict=True)))


def _unpacked(pack: Pack) -> Iterator[Mapping[str, Any]]:
    """Yield the suite's part of each record of a pack."""
    for name, summary in pack.summaries.items():
        data = pack.record(name)
        if not has_checksum(data, summary["checksum"]):
            raise UsageError(f"{pack.path}: the checksum of {name} is another than the pack says")
        yield from_json(data)["capmoe"]


def _layers(records: Iterable[Sequence[Mapping[str, Any]]]) -> pa.Table:
    """Return the layers of some records, in their order."""
    import pyarrow as pa

    table = pa.Table.from_pylist(
        [
            {"layer": number, **_flat(layer)}
            for layers in records
            for number, layer in enumerate(layers)
        ]
    )
    if table.num_columns:
        return table
    return pa.table({name: pa.nulls(0) for name in ("layer", *_names(Layer))})


def _flat(part: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their names with dots; "inf" is a number."""
    values: dict[str, Any] = {}
    for name, value in part.items():
        place = f"{prefix}.{name}".removeprefix(".")
        if isinstance(value, Mapping):
            values |= _flat(value, place)
        else:
            values[place] = math.inf if value == "inf" else value
    return values


def _names(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names that :func:`_flat` gives to the fields of a type of a record's part."""
    if isinstance(kind, type) and issubclass(kind, Part):
        for name, field in kind.model_fields.items():
            yield from _names(field.annotation, f"{prefix}.{name}".removeprefix("."))
    elif get_origin(kind) is dict:
        keys, value = get_args(kind)
        for key in get_args(keys):
            yield from _names(value, f"{prefix}.{key}")
    elif parts := [part for part in get_args(kind) if _is_nested(part)]:
        yield from itertools.chain.from_iterable(_names(part, prefix) for part in parts)
    else:
        yield prefix


def _is_nested(kind: Any) -> bool:
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Part))


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
