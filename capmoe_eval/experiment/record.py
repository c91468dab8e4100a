"""A record, the result of a cell: one JSON file that is whole or absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import from_json

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.experiment.cell import (
    Cell,
    not_registered,
)
from capmoe_eval.experiment.files import read_bytes, write_bytes
from capmoe_eval.experiment.names import BITS_PER_BYTE
from capmoe_eval.experiment.packs import SUFFIX, Pack, has_checksum, open_pack, pack_with, sealed
from capmoe_eval.experiment.record_part import (
    Amount,
    Answers,
    Calibrated,
    ChosenFactors,
    EngineRun,
    Layer,
    Load,
    Part,
    Positive,
    Proofs,
    Provenance,
    TaskAnswers,
    Truncated,
)
from capmoe_eval.routing.capacity import gamma_json

SCHEMA = 3
"""Version of the record's ``capmoe`` part; ``docs/results.md`` describes it."""

VERDICTS = "replication.json"
"""The file of a results directory that holds the replication's verdicts on its records."""

# Metrics that are shares, or means of shares; the others need only be finite.
_BOUNDED = (
    *("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"),
    *("rouge1", "rouge2", "rougeL"),
)


class Summary(Part):
    """The parts of a record without its answers and layers."""

    identity: dict[str, Any] = Field(alias="cell")
    digest: str
    value: float  # the task's metric as a fraction
    stderr: Amount | None  # its standard error over documents, as a fraction
    n: Positive  # documents
    truncated: Truncated | None = None  # None of records from before this field
    load: Load  # over all layers and forwards
    proofs: Proofs
    provenance: Provenance
    # Of methods that need one; with the factors that it chose where γ is adaptive.
    calibration: ChosenFactors | Calibrated | None = Field(None, union_mode="left_to_right")
    server: EngineRun | None = None  # of backend=vllm
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = ""  # of the file it was read from


class Whole(Summary):
    """The suite's part of a record."""

    documents: Annotated[dict[str, Answers], Field(min_length=1)]
    layers: Annotated[list[Layer], Field(min_length=1)]


class Record(Summary):
    """lm-eval's result dictionary of one task, with the suite's ``capmoe`` part as types.

    ``docs/results.md`` describes the fields; a record may have more. That of a pack is unpacked
    when its answers, layers or content are first asked for.
    """

    path: Path  # of its own file, which may not be written yet, or packed
    _pack: Pack | None = None

    @classmethod
    def of(cls, content: dict[str, Any], path: Path) -> Record:
        """Return the record with a content, the whole JSON object.

        Raises:
            ValueError: If it is invalid.
        """
        try:
            whole = Whole(**content["capmoe"])
            record = cls(**content["capmoe"], path=path)
        except ValidationError as error:
            raise ValueError(field_problem(error, "capmoe")) from error
        except OverflowError as error:
            raise ValueError("a number of 'capmoe' is too large") from error
        vars(record).update(content=content, _whole=whole)
        record._check()
        return record

    @property
    def pack(self) -> Pack | None:
        """The pack that it was read from; None where it has a file of its own."""
        return self._pack

    @property
    def summary(self) -> Mapping[str, Any]:
        """The parts beside its answers and layers, as JSON."""
        return self.capmoe if self._pack is None else self._pack.summaries[self.path.name]

    def _unpacked(self) -> bytes:
        assert self._pack is not None
        data = self._pack.record(self.path.name)
        if not has_checksum(data, self.checksum):
            raise UsageError(f"{self.path}: its checksum is another than its pack says")
        return data

    @cached_property
    def content(self) -> dict[str, Any]:
        """The whole JSON object."""
        content: dict[str, Any] = from_json(self._unpacked())
        return content

    @cached_property
    def _whole(self) -> Whole:
        return Whole(**self.capmoe)

    @cached_property
    def cell(self) -> Cell:
        """The cell that it is of."""
        try:
            cell = Cell.from_identity(self.identity)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"field 'capmoe.cell': cannot be read ({error})") from error
        if cell.identity() != self.identity:
            raise UsageError(
                "field 'capmoe.cell': cannot be read (a field is missing or has no effect)"
            )
        return cell

    @property
    def documents(self) -> TaskAnswers:
        """The answers to the documents, by subtask."""
        return self._whole.documents

    @property
    def layers(self) -> list[Layer]:
        """The statistics of every MoE layer."""
        return self._whole.layers

    def _check(self) -> None:
        """Refuse a record whose parts contradict each other, by a ValueError."""
        wrong = None
        scores = sum(len(part.correct) for part in self.documents.values())
        metric = self.cell.task.metric
        if self.digest != self.cell.digest:
            wrong = f"its cell has digest {self.cell.digest}, the record says {self.digest[:40]}"
        elif scores != self.n:
            wrong = f"n is {self.n}, and documents has {scores} scores"
        elif (metric in _BOUNDED or metric.startswith("pass@")) and not 0 <= self.value <= 1:
            wrong = f"value is {self.value:g}, and {metric} is a share, from 0 to 1"
        elif metric == BITS_PER_BYTE and not math.isclose(self.value, self._bits(), rel_tol=1e-6):
            wrong = f"value is {self.value:g}, and its documents have {self._bits():g}"
        elif (self.cell.backend == "vllm") != (self.server is not None):
            wrong = "server is of backend=vllm, and of no other"
        if wrong := wrong or self._wrong_factors():
            raise ValueError(f"field 'capmoe': {wrong}")

    def _bits(self) -> float:
        """Return the bits per byte of all documents together; NaN if their bytes are not there."""
        parts = self.documents.values()
        if any(part.bytes is None for part in parts):
            return math.nan
        texts = [
            pair for part in parts for pair in zip(part.correct, part.bytes or (), strict=True)
        ]
        return math.fsum(score * size for score, size in texts) / sum(size for _, size in texts)

    def _wrong_factors(self) -> str | None:
        """Return what contradicts the capacity factors that were set or chosen, or None."""
        method, calibration = self.cell.method, self.calibration
        if (method.calibration is None) != (calibration is None):
            return "calibration is of methods that need one, and of all of them"
        chosen = calibration if isinstance(calibration, ChosenFactors) else None
        factor, layers = method.factor, range(len(self.layers))
        is_chosen = factor is not None and factor.calibration is not None
        if is_chosen != (chosen is not None):
            return "calibration.gammas is of gamma=adaptive, and of no other"
        expected: list[float | str | None] = [None for _ in layers]
        if chosen is not None:
            expected = list(map(gamma_json, chosen.gammas))
        elif factor is not None and factor.uniform is None:
            factor.check_layers(len(layers))
            expected = [gamma_json(factor.of_layer(number)) for number in layers]
        if [layer.gamma for layer in self.layers] != expected:
            return "its layers have other capacity factors than were set or chosen"
        return None

    @property
    def capmoe(self) -> dict[str, Any]:
        """The ``capmoe`` part as JSON, with fields that no type names."""
        part: dict[str, Any] = self.content["capmoe"]
        return part

    @property
    def model(self) -> str:
        """Key of the model."""
        return self.cell.model.name

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.cell.method.name

    @property
    def gamma(self) -> float | None:
        """Capacity factor, or None where the method has none, or one for each layer."""
        return self.cell.method.uniform_gamma

    @property
    def task(self) -> str:
        """Key of the task."""
        return self.cell.task.name

    def score(self, metric: str) -> tuple[float, float | None, int, TaskAnswers]:
        """Return a metric of the task that need not be its own.

        Its value and standard error are in its own units: fractions, or MME's points. With them
        come the number of documents that it is of, and the answers to these.

        Raises:
            UsageError: If the record does not have it, as where a limit left no document of it.
        """
        cell = self.cell.task
        results = self.content["results"].get(cell.lm_eval, {})
        value, stderr = (results.get(f"{m},{cell.filter}") for m in (metric, f"{metric}_stderr"))
        if not isinstance(value, (int, float)):
            raise UsageError(
                f"{self.path}: has no metric {metric}; run it again with limit=null overwrite=true"
            )
        documents = {name: part.of_metric(metric) for name, part in self.documents.items()}
        count = sum(len(part.correct) for part in documents.values())
        error = float(stderr) if isinstance(stderr, (int, float)) else None
        return float(value), error, count, documents

    def write(self) -> None:
        """Seal the record with its checksum and write it; UsageError if it is invalid."""
        data, root = sealed(self.content), self.path.parents[2]
        try:
            _parsed(data, self.path, root)
        except ValueError as error:
            raise UsageError(f"{self.path}: not written: {error}") from error
        with writing("results_dir", root):
            write_bytes(self.path, data)


class NotRegisteredError(UsageError):
    """A record is of a method, or of a knob's value, that no installed package registers."""

    def __init__(self, path: Path, missing: str) -> None:
        super().__init__(
            f"{path}: {missing} is not registered; install the package that has it, or delete the "
            "record"
        )
        self.missing = missing


def read_record(path: Path, root: Path | None = None) -> Record:
    """Read and validate a record, from its own file or from its pack.

    It must have its cell's path below the results directory, or its cell's file name where none is
    given.

    Raises:
        NotRegisteredError: If nothing registers its method.
        UsageError: If the file is truncated, changed, no record, of another schema or cell; or the
            pack is damaged.
    """
    if path.name.endswith(SUFFIX):
        open_pack(path)  # says what is wrong with it
    try:
        return _parsed(read_bytes(path), path, root)
    except NotRegisteredError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (record := _packed(path)) is not None:
            return record
        wrong = f"not a whole record ({error})"
    except ValueError as error:
        wrong = str(error)
    raise UsageError(f"{path}: {' '.join(wrong.split())}; delete it to compute it anew")


def _packed(path: Path) -> Record | None:
    """Return the record that a pack has, by the path of its own file, or None."""
    if (pack := pack_with(path)) is None:
        return None
    summary = pack.summaries[path.name]
    if missing := not_registered(summary["cell"]):
        raise NotRegisteredError(path, missing)
    if summary["schema"] != SCHEMA:
        raise UsageError(f"{pack.path}: schema {summary['schema']}, this version reads {SCHEMA}")
    names = tuple(summary["cell"][part]["name"] for part in ("model", "task"))
    if path.parts[-3:-1] != names:
        raise UsageError(f"{pack.path}: the pack of another place, which is {'/'.join(names)}")
    record = Record(**summary, path=path)
    record._pack = pack
    return record


def _parsed(data: bytes, path: Path, root: Path | None) -> Record:
    """Return the record whose file has these bytes, or raise ValueError with what is wrong."""
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not a whole record ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("capmoe"), dict):
        raise ValueError("no record of this suite (it has no 'capmoe' part)")
    schema = content["capmoe"].get("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema {str(schema)[:40]}, this version reads {SCHEMA}")
    if missing := not_registered(content["capmoe"].get("cell")):
        raise NotRegisteredError(path, missing)
    record = Record.of(content, path)
    if not has_checksum(data, record.checksum):
        raise ValueError("it was changed after it was written (its checksum is another)")
    home = record.cell.path(Path())
    here = Path(path.name) if root is None else path.relative_to(root)
    if here != (Path(home.name) if root is None else home):
        raise ValueError(f"the record of another cell, whose place is {home}")
    return record
