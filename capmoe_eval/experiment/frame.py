"""Records for other tools: a pandas data frame, a Parquet file, a JSON schema."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from capmoe_eval.errors import UsageError, reading, writing
from capmoe_eval.experiment.cell import CELL_FIELDS, OMITTED, ModelId, TaskId
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.experiment.record import SCHEMA, Details, Summary, read_summary
from capmoe_eval.experiment.record_part import Proofs
from capmoe_eval.experiment.results import (
    directories,
    each_whole,
    files_with_records,
    record_places,
    result_directories,
)
from capmoe_eval.routing.factor import factor_forms, gamma_number
from capmoe_eval.routing.registry import knobs

PARQUET: Final = ".parquet"
_ABOUT: Final = b"capmoe"

if TYPE_CHECKING:
    import pandas as pd


def _columns(name: str, kind: type) -> dict[str, tuple[str, object]]:
    """Return field and default of the columns of a part of a cell."""
    fields = dataclasses.fields(kind)
    return {
        f"{name}.{field.name}".removesuffix(".name"): (
            field.name,
            None if field.default is dataclasses.MISSING else field.default,
        )
        for field in fields
    }


_OF_PARTS: Final = {"model": _columns("model", ModelId), "task": _columns("task", TaskId)}
_OF_LOAD: Final = ("drop_rate", "pad_waste", "effective_gamma", "peak_before", "peak_after")
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

_RESULTS: Final = (
    *("label", "value", "stderr", "n", *_OF_LOAD),
    *("proven", "examined", "seconds", "results_dir", "path"),
)


def load_frame(root: Path | str) -> pd.DataFrame:
    """Return one row per record of a results directory or a Parquet file, in their paths' order.

    The first columns are :data:`IDENTITY`, every field of a cell's identity: two cells differ in
    one of them at least. A field is missing where it has no effect, such as ``gamma`` where the
    method has none. The other columns are:

    - ``label``: the method and its knobs
    - ``value`` and ``stderr``: fractions
    - ``n``: documents
    - ``drop_rate`` and ``pad_waste``: fractions of pairs and of slots
    - ``effective_gamma``: capacity over the mean load; missing without a capacity
    - ``peak_before`` and ``peak_after``: the highest expert load over the mean
    - ``proven``: whether no invariant failed
    - ``examined``: the share of the forwards that an independent check examined; missing in records
      from before the check
    - ``seconds``, ``results_dir`` and ``path``

    A file that is no whole record is left out, with a warning that names it; so are all records of
    methods that are not registered, with a warning that counts them. ``root`` is the
    directory of a profile (``results/zoo``, and with the user's own ``results/local-zoo``), or of
    several (``results``).

    Raises:
        UsageError: If there is no such directory, or no whole record in it; or if the records are
            no longer those of which :func:`write_parquet` wrote the file.
    """
    if Path(root).suffix == PARQUET:
        return _read_parquet(Path(root))
    root, rows, refused = Path(root), list[dict[str, object]](), list[str]()
    for directory in result_directories(root):
        broken: list[str] = []
        rows += each_whole(
            lambda path, root: _row(read_summary(path, root), path, root),
            record_places(directory),
            broken,
        )
        refused += broken
    if not rows:
        wrong = "has no whole record" if root.is_dir() else "no such directory"
        raise UsageError(
            f"{root}: {wrong}; name the directory of a profile, such as results/zoo, or of "
            "several, such as results"
        )
    for line in refused:
        warnings.warn(f"left out: {line}", stacklevel=2)
    return _frame(rows)


def frame_of(summaries: Iterable[tuple[Mapping[str, Any], Path, Path]]) -> pd.DataFrame:
    """Return the data frame of records that were read, as :func:`load_frame`.

    Args:
        summaries: Of each what it says beside its answers and layers, its path and its results
            directory.
    """
    return _frame([_row(*summary) for summary in summaries])


def _frame(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    import pandas as pd

    columns = dict.fromkeys((*IDENTITY, *_RESULTS, *itertools.chain.from_iterable(rows)))
    return pd.DataFrame(rows, columns=list(columns))


def write_parquet(root: Path, file: Path) -> None:
    """Write the data frame of a results directory to a Parquet file, which any such reader takes.

    Values of several types and tuples are JSON there. Errors as :func:`load_frame`.
    """
    import pyarrow as pa
    from pyarrow import parquet

    version, frame = _version(root), load_frame(root)
    mixed = [name for name in frame if frame[name].dtype == object]
    for name in mixed:
        frame[name] = [value if value is None else json.dumps(value) for value in frame[name]]
    place = os.path.relpath(root, file.parent)
    about = json.dumps({"results": place, "version": version, "json": mixed})
    table = pa.Table.from_pandas(frame)
    table = table.replace_schema_metadata({**table.schema.metadata, _ABOUT: about})
    with writing("parquet", file), whole_file(file) as stream:
        parquet.write_table(table, stream)


def _read_parquet(file: Path) -> pd.DataFrame:
    """Return the frame of a Parquet file, unless the records are there and no longer its own."""
    import pandas as pd
    from pyarrow import parquet

    with reading(file, "no data frame of records", "write it with capmoe-eval pack --parquet FILE"):
        table = parquet.read_table(file)
        about = json.loads(table.schema.metadata[_ABOUT])
        frame: pd.DataFrame = table.to_pandas()
        for name in about["json"]:
            frame[name] = pd.Series(map(_from_json, frame[name]), dtype=object)
    root = file.parent / about["results"]
    if root.is_dir() and _version(root) != about["version"]:
        raise UsageError(
            f"{file}: the records of {root} are others now; write it again with capmoe-eval pack "
            f"results_dir={root} --parquet {file}, or read the directory"
        )
    return frame


def _from_json(text: str | None) -> object:
    value = None if text is None else json.loads(text)
    return tuple(value) if isinstance(value, list) else value


def _version(root: Path) -> str:
    """Return a digest over the names, sizes and times of all files that have records."""
    digest = hashlib.sha256()
    for directory in map(directories, result_directories(root)):
        for file in itertools.chain(*(map(files_with_records, directory))):
            status = file.stat()
            digest.update(f"{file.relative_to(root.parent)} {status.st_size} ".encode())
            digest.update(f"{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _row(part: Mapping[str, Any], path: Path, root: Path) -> dict[str, object]:
    cell, load = part["cell"], part["load"]
    method = dict(cell["method"])
    if "gamma" in method:
        method["gamma"] = gamma_number(method["gamma"])
    if "layer_gammas" in method:
        method["layer_gammas"] = tuple(map(gamma_number, method["layer_gammas"]))
    proofs = [part["proofs"].get(name) or {} for name in Proofs.model_fields]
    shares = (proof.get("examined") or {} for proof in proofs)
    return {
        **{
            column: cell[name].get(field, default)
            for name, columns in _OF_PARTS.items()
            for column, (field, default) in columns.items()
        },
        **method,
        **{name: cell.get(name, OMITTED.get(name)) for name in CELL_FIELDS},
        "label": path.name.removesuffix(f"-{part['digest']}.json"),
        **{name: part[name] for name in ("value", "stderr", "n")},
        **{name: load.get(name) for name in _OF_LOAD},
        "proven": not any(proof.get("passed") is False for proof in proofs),
        "examined": min((s["forwards"] / s["of"] for s in shares if s.get("of")), default=None),
        "seconds": part["provenance"]["seconds"],
        "results_dir": str(root),
        "path": str(path),
    }


class _Whole(Summary, Details):
    """The suite's part of a record."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a record's file, ``docs/record.schema.json``."""
    part = _Whole.model_json_schema()
    definitions = part.pop("$defs")
    kinds = {"model": ModelId, "task": TaskId}
    cell = {name: TypeAdapter(kind).json_schema() for name, kind in kinds.items()}
    cell["method"] = {"type": "object", "required": ["method"]}
    part["properties"]["schema"] = {"const": SCHEMA}
    part["properties"]["cell"] = {
        "type": "object",
        "properties": cell,
        "required": [*cell, *(name for name in CELL_FIELDS if name not in OMITTED)],
    }
    part["required"] = sorted([*part["required"], "schema", "checksum"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of capmoe_eval",
        "type": "object",
        "properties": {"capmoe": part},
        "required": ["capmoe"],
        "$defs": definitions,
    }
