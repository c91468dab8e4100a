"""A record, the result of a cell: one JSON file that is whole or absent."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field, PlainValidator, ValidationError, model_validator
from pydantic_core import from_json

from capmoe_eval.errors import UsageError, field_problem, shown, writing
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.files import read_bytes, write_bytes
from capmoe_eval.experiment.record_part import (
    Amount,
    Calibrated,
    ChosenFactors,
    Documents,
    Layer,
    Load,
    Part,
    Positive,
    Proofs,
    Provenance,
)
from capmoe_eval.routing.factor import CapacityFactor, factor_forms, gamma_json
from capmoe_eval.routing.registry import knobs, method_names, placements

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA = 3
"""Version of the record's ``capmoe`` part; ``docs/results.md`` describes it."""

VERDICTS = "replication.json"
"""The file of a results directory that holds the replication's verdicts on its records."""

# Metrics that are shares, or means of shares; the others need only be finite.
_BOUNDED = (
    *("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"),
    *("rouge1", "rouge2", "rougeL"),
)

# A list of numbers as json indents it. No string of JSON holds a bare line break.
_NUMBERS = re.compile(r'\[\n([^\[\]{}"]+)\n *\]')

_CHECKSUM = b'"checksum": "%s"'
_BLANK = "0" * 64


Scored: TypeAlias = (
    "Mapping[str, tuple[str, NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]]"
)
"""Per subtask: the hash over its documents, their scores, and their batches and images if known,
else nothing."""


class Score(NamedTuple):
    """One metric of a record."""

    value: float  # in its own units: a fraction, or MME's points
    stderr: float | None  # in the same units
    n: int  # documents that it is of
    documents: Scored  # these documents; the hash is that over all of the task


def _cell(identity: dict[str, object]) -> Cell:
    try:
        cell = Cell.from_identity(identity)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if cell.identity() != identity:
        raise ValueError("cannot be read (a field is missing or has no effect)")
    return cell


class Record(Part):
    """lm-eval's result dictionary of one task, with the suite's ``capmoe`` part as types.

    ``docs/results.md`` describes the fields; a record may have more. One that is invalid raises a
    ValidationError when it is made.
    """

    content: dict[str, Any]  # the whole JSON object
    path: Path  # of its file, which may not be written yet
    cell: Annotated[Cell, PlainValidator(_cell)]
    digest: str
    value: float  # the task's metric as a fraction
    stderr: Amount | None  # its standard error over documents, as a fraction
    n: Positive  # documents
    subtasks: Annotated[dict[str, Documents], Field(alias="documents", min_length=1)]
    load: Load  # over all layers and forwards
    layers: Annotated[list[Layer], Field(min_length=1)]
    proofs: Proofs
    provenance: Provenance
    # Of methods that need one; with the factors that it chose where γ is adaptive.
    calibration: ChosenFactors | Calibrated | None = Field(None, union_mode="left_to_right")
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = ""  # of the file it was read from

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(**{**content["capmoe"], "content": content, "path": path})

    @model_validator(mode="after")
    def _hangs_together(self) -> Record:
        if self.digest != self.cell.digest:
            raise ValueError(
                f"its cell has digest {self.cell.digest}, the record says {self.digest[:40]}"
            )
        scores = sum(len(part.correct) for part in self.subtasks.values())
        if scores != self.n:
            raise ValueError(f"n is {self.n}, and documents has {scores} scores")
        self._check_factors()
        metric = self.cell.task.metric
        if (metric in _BOUNDED or metric.startswith("pass@")) and not 0 <= self.value <= 1:
            raise ValueError(f"value is {self.value:g}, and {metric} is a share, from 0 to 1")
        return self

    def _check_factors(self) -> None:
        """Refuse a record without its calibration, or whose layers have another γ than is said."""
        method, calibration = self.cell.method, self.calibration
        if (method.calibration is None) != (calibration is None):
            raise ValueError("calibration is of methods that need one, and of all of them")
        chosen = calibration if isinstance(calibration, ChosenFactors) else None
        factor, layers = method.factor, range(len(self.layers))
        is_chosen = factor is not None and factor.calibration is not None
        if is_chosen != (chosen is not None):
            raise ValueError("calibration.gammas is of gamma=adaptive, and of no other")
        expected: list[float | str | None] = [None for _ in layers]
        if chosen is not None:
            expected = list(map(gamma_json, chosen.gammas))
        elif factor is not None and factor.uniform is None:
            factor.check_layers(len(layers))
            expected = [gamma_json(factor.of_layer(number)) for number in layers]
        if [layer.gamma for layer in self.layers] != expected:
            raise ValueError("its layers have other capacity factors than were set or chosen")

    @property
    def capmoe(self) -> dict[str, Any]:
        """The ``capmoe`` part as JSON, with fields that no type names."""
        part: dict[str, Any] = self.content["capmoe"]
        return part

    # For tables.

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
    def factor(self) -> CapacityFactor | None:
        """Capacity factor: uniform, by layer, or the rule that chose them; or None."""
        return self.cell.method.factor

    @property
    def task(self) -> str:
        """Key of the task."""
        return self.cell.task.name

    @property
    def seed(self) -> int | None:
        """Seed of a random method, else None."""
        return getattr(self.cell.method, "seed", None)

    @property
    def knobs(self) -> Mapping[str, object]:
        """The method's knobs that have an effect, without name, γ and seed."""
        named = ("method", "gamma", "seed")
        knobs = self.cell.method.identity().items()
        return {knob: value for knob, value in knobs if knob not in named}

    @cached_property
    def documents(self) -> Scored:
        """The scores of all documents, per subtask."""
        import numpy as np  # which an evaluation's start need not wait for

        def whole(numbers: list[int] | None) -> NDArray[np.int64]:
            return np.array(numbers or (), np.int64)

        return {
            name: (
                part.documents,
                np.array(part.correct),
                whole(part.batches),
                whole(part.images),
            )
            for name, part in sorted(self.subtasks.items())
        }

    def score(self, metric: str) -> Score:
        """Return a metric of the task that need not be its own.

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
        documents = {}
        for name, (found, correct, batches, images) in self.documents.items():
            places = self.subtasks[name].metrics.get(metric, list(range(len(correct))))
            documents[name] = (
                found,
                correct[places],
                batches[places] if len(batches) else batches,
                images[places] if len(images) else images,
            )
        known = isinstance(stderr, (int, float))
        count = sum(len(part[1]) for part in documents.values())
        return Score(float(value), float(stderr) if known else None, count, documents)

    def write(self) -> None:
        """Seal the record with its checksum and write it; UsageError if it is invalid."""
        data, root = sealed(self.content), self.path.parents[2]
        try:
            _parsed(data, self.path, root)
        except ValueError as error:
            raise UsageError(f"{self.path}: not written: {error}") from error
        with writing("results_dir", root):
            write_bytes(self.path, data)


def sealed(content: dict[str, Any]) -> bytes:
    """Set the checksum of a record's content and return the bytes of its file.

    The checksum is the SHA-256 of the file with 64 zeros in the checksum's place. NaN in lm-eval's
    part becomes null, as JSON has none.
    """
    part = content["capmoe"]
    part["checksum"] = _BLANK
    whole = {key: _finite(value) for key, value in content.items()} | {"capmoe": part}
    text = json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False)
    data = (_NUMBERS.sub(lambda n: f"[{' '.join(n[1].split())}]", text) + "\n").encode()
    part["checksum"] = hashlib.sha256(data).hexdigest()
    return data.replace(_CHECKSUM % _BLANK.encode(), _CHECKSUM % part["checksum"].encode())


def relabelled(record: Record, data: bytes, cell: Cell) -> bytes:
    """Return the bytes of a record's file as another cell's, sealed; nothing else of it changes.

    It is for benchmarks, which need many records: to write one from its content takes 40 times as
    long.
    """

    def lines(of: Cell) -> bytes:
        text = json.dumps(of.identity(), indent=1, sort_keys=True, ensure_ascii=False)
        return f'"cell": {text}'.replace("\n", "\n  ").encode()

    for old, new in (
        (_CHECKSUM % record.checksum.encode(), _CHECKSUM % _BLANK.encode()),
        (lines(record.cell), lines(cell)),
        (b'"digest": "%s"' % record.digest.encode(), b'"digest": "%s"' % cell.digest.encode()),
    ):
        assert data.count(old) == 1
        data = data.replace(old, new)
    checksum = hashlib.sha256(data).hexdigest().encode()
    return data.replace(_CHECKSUM % _BLANK.encode(), _CHECKSUM % checksum)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class NotRegisteredError(UsageError):
    """A record is of a method, or of a knob's value, that no installed package registers."""

    def __init__(self, path: Path, missing: str) -> None:
        super().__init__(
            f"{path}: {missing} is not registered; install the package that has it, or delete the "
            "record"
        )
        self.missing = missing


def read_record(path: Path, root: Path | None = None) -> Record:
    """Read and validate a record.

    It must have its cell's path below the results directory, or its cell's file name where none is
    given.

    Raises:
        NotRegisteredError: If nothing registers its method.
        UsageError: If the file is truncated, changed, no record, of another schema or cell.
    """
    try:
        return _parsed(read_bytes(path), path, root)
    except NotRegisteredError:
        raise
    except OSError as error:
        wrong = f"not a whole record ({error})"
    except ValueError as error:
        wrong = str(error)
    raise UsageError(f"{path}: {' '.join(wrong.split())}; delete it to compute it anew")


def _not_registered(cell: Any) -> str | None:
    """Return what nothing registers of a cell's method: its name, a knob or a value; or None."""
    settings = cell.get("method") if isinstance(cell, dict) else None
    if not isinstance(settings, dict):
        return None
    choices: Mapping[str, Collection[object]] = {
        "method": method_names(),
        "placement": placements(),
        "gamma": ("inf", *(form.keyword for form in factor_forms())),
    }
    names = {"method", "gamma", *knobs()}
    for name, value in sorted(settings.items(), key=lambda setting: setting[0] != "method"):
        if name not in names:
            return str(name)
        if isinstance(value, str) and value not in choices.get(name, (value,)):
            return f"{name}={shown(value)}"
    return None


def _parsed(data: bytes, path: Path, root: Path | None) -> Record:
    """Return the record that a file holds, or raise ValueError with what is wrong."""
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not a whole record ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("capmoe"), dict):
        raise ValueError("no record of this suite (it has no 'capmoe' part)")
    schema = content["capmoe"].get("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema {str(schema)[:40]}, this version reads {SCHEMA}")
    if missing := _not_registered(content["capmoe"].get("cell")):
        raise NotRegisteredError(path, missing)
    try:
        record = Record(content, path)
    except ValidationError as error:
        raise ValueError(field_problem(error, "capmoe")) from error
    except OverflowError as error:
        raise ValueError("a number of 'capmoe' is too large") from error
    blanked = data.replace(_CHECKSUM % record.checksum.encode(), _CHECKSUM % _BLANK.encode())
    if hashlib.sha256(blanked).hexdigest() != record.checksum:
        raise ValueError("it was changed after it was written (its checksum is another)")
    home = record.cell.path(Path())
    here = Path(path.name) if root is None else path.relative_to(root)
    if here != (Path(home.name) if root is None else home):
        raise ValueError(f"the record of another cell, whose place is {home}")
    return record
