"""Records as data frames: a row for each cell, for each of its documents and of its MoE layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_origin

from pydantic_core import from_json

from capmoe_eval.errors import LeftOutWarning, UsageError
from capmoe_eval.experiment.cell import CELL_FIELDS, OMITTED, ModelId, TaskId
from capmoe_eval.experiment.datasource import cache_directory
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.experiment.packs import Pack
from capmoe_eval.experiment.record import Layer, Load, Part, Proofs, Record
from capmoe_eval.experiment.results import read_results
from capmoe_eval.lazy import np, pa, pd
from capmoe_eval.routing.capacity import gamma_number
from capmoe_eval.routing.registry import knobs

MIX: Final = "zero_shot_mix"
"""The task whose requests, of four tasks, meet in one batch."""
_VERSION: Final = 2
"""Of the columns of kept documents and layers, which have a folder of their own."""


# Field and default of the columns of a part of a cell.
_OF_PARTS: Final[dict[str, dict[str, tuple[str, object]]]] = {
    part: {
        f"{part}.{field.name}".removesuffix(".name"): (
            field.name,
            None if field.default is dataclasses.MISSING else field.default,
        )
        for field in dataclasses.fields(kind)
    }
    for part, kind in (("model", ModelId), ("task", TaskId))
}
IDENTITY: Final = (
    *_OF_PARTS["model"],
    *("method", "gamma", *knobs()),  # of all methods and forms of γ that are registered now
    *_OF_PARTS["task"],
    *CELL_FIELDS,
)
"""The columns that tell cells apart: ``model``, ``model.revision``, ``task``, ``task.fewshot``, the
method's knobs and the evaluation's, such as ``gamma`` and ``batch_size``."""
_OF_LOAD: Final = ("drop_rate", "pad_waste", "effective_gamma", "peak_before", "peak_after")
_SCORE: Final = ("value", "stderr", "n")
_COLUMNS: Final = (
    *("cell", "setting", "metric", *IDENTITY, "label", *_SCORE, *_OF_LOAD),
    *("proven", "examined", "seconds", "results_dir", "path"),
)


class Results(NamedTuple):
    """The results of some cells.

    ``cells`` has a row for each cell. Its columns:

    - ``cell``: the digest
    - ``setting``: the method with all its knobs but the seed (:func:`setting`)
    - ``metric``: of which the value is, where it is not the task's own, else an empty text
    - :data:`IDENTITY`, every field of a cell's identity: two cells differ in one of them at least.
      A field is missing where it has no effect, such as ``gamma`` where the method has none.
    - ``label``: the method and its knobs
    - ``value`` and ``stderr``: fractions; ``n``: documents
    - ``drop_rate`` and ``pad_waste``: fractions of pairs and of slots
    - ``effective_gamma``: capacity over the mean load; missing without a capacity
    - ``peak_before`` and ``peak_after``: the highest expert load over the mean
    - ``load.…``: the record's further statistics over all layers, such as ``load.mean_load`` and
      ``load.modalities.text.drop_rate``
    - ``proven``: whether no invariant failed; ``proofs.…``: whether each was kept, missing where it
      does not apply
    - ``examined``: the share of the forwards that an independent check examined; missing in records
      from before the check
    - ``truncated.documents``: those whose prompts were, and the most ``truncated.tokens`` that one
      lost; missing in records from before this count
    - ``seconds``, ``results_dir`` and ``path``

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
    its number from 0, and the fields of :class:`capmoe_eval.experiment.record.Layer`, a dot
    for each level, such as ``peak.expert_before.mean``. Lists have a number for each expert
    (``load_before``, ``score_by_rank``), or for each γ (``grid.gamma``, ``grid.drop_rate``):
    ``layers.explode(["load_before", "load_after"])`` has a row for each expert.
    """

    cells: pd.DataFrame
    documents: pd.DataFrame
    layers: pd.DataFrame


def read(*roots: Path | str) -> Results:
    """Return the results in some directories; of a cell in several, those of the first.

    A file that is not whole is left out, with a warning that names it. The documents of packs are
    kept in the user's cache as Parquet, by the packs' digests.

    Raises:
        UsageError: If there is no whole record.
    """
    return results_of(_whole(*map(Path, roots)))


def load_frame(*roots: Path | str) -> pd.DataFrame:
    """Return the cells alone of some directories, as :class:`Results`, in their paths' order.

    Of a cell in several directories there is the row of the first, as in :func:`read`.

    A file that is no whole record is left out, with a warning that names it; so are all records of
    methods that are not registered, with a warning that counts them. A directory is that of a
    profile: ``results/zoo``, and with the user's own ``results/local-zoo``.

    Raises:
        UsageError: If there is no such directory, or no whole record in it.
    """
    return _frame([_row(record) for record in _by_cell(_whole(*map(Path, roots))).values()])


def _by_cell(records: Iterable[Record]) -> dict[str, Record]:
    """Return the first of some records of each cell, by its digest."""
    by_cell: dict[str, Record] = {}
    for record in records:
        by_cell.setdefault(record.digest, record)
    return by_cell


def _whole(*roots: Path) -> list[Record]:
    """Return the whole records of some directories; warn of other files."""
    broken: list[str] = []
    records = [record for root in roots for record in read_results(root, broken)]
    for line in dict.fromkeys(broken):
        warnings.warn(f"left out: {line}", LeftOutWarning, stacklevel=3)
    if not records:
        absent = [str(root) for root in roots if not root.is_dir()]
        wrong = "no such directory" if absent else "has no whole record"
        raise UsageError(
            f"{', '.join(absent or map(str, roots)) or 'roots'}: {wrong}; name the directory of a "
            "profile, such as results/zoo"
        )
    return records


def _frame(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    loads = (name for name in _names(Load, "load") if name.partition(".")[2] not in _OF_LOAD)
    return pd.DataFrame(
        rows, columns=[*dict.fromkeys((*_COLUMNS, *loads, *itertools.chain.from_iterable(rows)))]
    )


def results_of(
    records: Iterable[Record], metrics: Mapping[str, Collection[str]] | None = None
) -> Results:
    """Return the results of some records; of several records of a cell, those of the first.

    Args:
        records: Of any cells.
        metrics: Of which the values and documents are, by task, as lm-eval names them; a cell has a
            row for each. An empty text is the task's own, as of a task that is not there. A record
            without such a metric is a UsageError.
    """
    by_cell, metrics = _by_cell(records), metrics or {}
    rows = [(r, metric) for r in by_cell.values() for metric in metrics.get(r.task, [""])]
    cells = _frame([_row(record, metric) for record, metric in rows])
    parts = {digest: _parts(record) for digest, record in by_cell.items()}
    tables, of_layers = [parts[r.digest][0] for r, _ in rows], [part[1] for part in parts.values()]
    for row, (record, metric) in enumerate(rows):
        if metric:
            answers = [part for _, part in sorted(record.documents.items())]
            starts = np.cumsum([0, *(len(part.correct) for part in answers)]).tolist()
            both = zip(starts, answers, strict=False)
            places = [start + place for start, part in both for place in part.places(metric)]
            tables[row] = tables[row].take(places)
    documents = pa.concat_tables(tables or [_table([])]).unify_dictionaries().to_pandas()
    of_cell = np.repeat(np.arange(len(cells)), list(map(len, tables)))
    documents.insert(0, "cell", pd.Categorical(cells["cell"], [*by_cell]).take(of_cell))
    # Fields that some records lack, and lists in which all numbers are missing.
    layers = pa.concat_tables([_layers([]), *of_layers], promote_options="permissive").to_pandas()
    digests = np.array([*by_cell], dtype=object)  # of texts, also where there is none
    layers.insert(0, "cell", np.repeat(digests, list(map(len, of_layers))))
    tasks = pd.Categorical(cells["task"])
    task = pd.Series(tasks.take(of_cell))
    if MIX in tasks.categories:
        subtasks = documents["subtask"].cat.categories
        task = task.cat.add_categories(subtasks.difference(tasks.categories))
        task = task.where(task != MIX, documents["subtask"].astype(task.dtype))
    documents.insert(1, "task", task)
    return Results(cells, documents, layers)


def _row(record: Record, metric: str = "") -> dict[str, object]:
    """Return the row of a cell and a metric: of JSON, which takes half the time of types."""
    part, path = record.summary, record.path
    cell, load, truncated = part["cell"], part["load"], part.get("truncated") or {}
    method = dict(cell["method"])
    if "gamma" in method:
        method["gamma"] = gamma_number(method["gamma"])
    if "layer_gammas" in method:
        method["layer_gammas"] = tuple(map(gamma_number, method["layer_gammas"]))
    proofs = {name: part["proofs"].get(name) or {} for name in Proofs.model_fields}
    shares = (proof.get("examined") or {} for proof in proofs.values())
    score = {name: part[name] for name in _SCORE}
    if metric:
        score = dict(zip(_SCORE, record.score(metric), strict=True))
    return {
        "cell": record.digest,
        "setting": setting(cell["method"]),
        "metric": metric,
        **{
            column: cell[name].get(field, default)
            for name, columns in _OF_PARTS.items()
            for column, (field, default) in columns.items()
        },
        **method,
        **{name: cell.get(name, OMITTED.get(name)) for name in CELL_FIELDS},
        "label": path.name.removesuffix(f"-{part['digest']}.json"),
        **score,
        **{name: load.get(name) for name in _OF_LOAD},
        "proven": not any(proof.get("passed") is False for proof in proofs.values()),
        "examined": min((s["forwards"] / s["of"] for s in shares if s.get("of")), default=None),
        "seconds": part["provenance"]["seconds"],
        "results_dir": str(path.parents[2]),
        "path": str(path),
        **_flat({name: load[name] for name in load if name not in _OF_LOAD}, "load"),
        **{f"proofs.{name}": proof.get("passed") for name, proof in proofs.items()},
        **{
            f"truncated.{name}": float(truncated.get(name, math.nan))
            for name in ("documents", "tokens")
        },
    }


def setting(method: Mapping[str, object]) -> str:
    """Return a method's identity without its seed, by which cells of one setting are picked."""
    unseeded = {name: value for name, value in method.items() if name != "seed"}
    return json.dumps(unseeded, sort_keys=True)


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


def _parts(record: Record) -> tuple[pa.Table, pa.Table]:
    """Return the documents and layers of a record, from those kept of its pack or its file."""
    if record.pack is None:
        part = record.capmoe
        return _table([part["documents"]]), _layers([part["layers"]])
    return _of_pack(record.pack)[record.path.name]


@functools.lru_cache(maxsize=1024)
def _of_pack(pack: Pack) -> Mapping[str, tuple[pa.Table, pa.Table]]:
    """Return the documents and layers of each record of a pack, by the name of its file."""
    from pyarrow import parquet

    folder = cache_directory() / f"frames-{_VERSION}"
    files = [folder / f"{pack.digest}.{name}.parquet" for name in ("documents", "layers")]
    try:
        tables = [parquet.read_table(file, memory_map=False) for file in files]
    except (OSError, pa.ArrowInvalid):  # absent, or damaged
        records = [from_json(pack.record(name))["capmoe"] for name in pack.summaries]
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
    places = zip(pack.summaries, ends, counts, first, sizes, strict=True)
    return {
        name: (documents.slice(end - count, count), layers.slice(row, size))
        for name, end, count, row, size in places
    }


def _layers(records: Iterable[Sequence[Mapping[str, Any]]]) -> pa.Table:
    """Return the layers of some records, in their order."""
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
    else:  # of a union or an annotated type the names of its parts, if one is nested
        parts = itertools.chain.from_iterable(_names(part, prefix) for part in get_args(kind))
        yield from [name for name in parts if name != prefix] or [prefix]


def _table(records: Iterable[Mapping[str, Mapping[str, Any]]]) -> pa.Table:
    """Return the documents of some records, in their order, each by subtask."""
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
