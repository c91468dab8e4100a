"""A record, the result of a cell: one JSON file that is whole or absent."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.files import write_bytes

if TYPE_CHECKING:
    from capmoe_eval.experiment.record_part import Layer, Load, Proofs, Provenance, RecordPart

SCHEMA = 3
"""Version of the record's ``capmoe`` part; ``docs/results.md`` describes it."""

VERDICTS = "replication.json"
"""The file of a results directory that holds the replication's verdicts on its records."""

# A list of numbers as json indents it. No string of JSON holds a bare line break.
_NUMBERS = re.compile(r'\[\n([^\[\]{}"]+)\n *\]')

_CHECKSUM = b'"checksum": "%s"'
_BLANK = "0" * 64


@dataclass(frozen=True)
class Record:
    """lm-eval's result dictionary of one task, with the suite's ``capmoe`` part.

    Attributes:
        content: The whole JSON object.
        path: Path of its file, which may not be written yet.
    """

    content: dict[str, Any]
    path: Path

    @property
    def capmoe(self) -> dict[str, Any]:
        """The ``capmoe`` part as JSON, with fields that no type names."""
        part: dict[str, Any] = self.content["capmoe"]
        return part

    @cached_property
    def part(self) -> RecordPart:
        """The ``capmoe`` part as types; validated when first used.

        Raises:
            ValidationError: If it is invalid.
        """
        from capmoe_eval.experiment.record_part import RecordPart

        return RecordPart.model_validate(self.capmoe)

    @property
    def cell(self) -> Cell:
        """The cell that produced it."""
        return self.part.cell

    @property
    def load(self) -> Load:
        """Load statistics over all layers and forwards."""
        return self.part.load

    @property
    def layers(self) -> Sequence[Layer]:
        """Load statistics of each MoE layer."""
        return self.part.layers

    @property
    def proofs(self) -> Proofs:
        """The promises, and which of them were kept."""
        return self.part.proofs

    @property
    def provenance(self) -> Provenance:
        """The conditions under which it was computed."""
        return self.part.provenance

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
        """Capacity factor, or None where the method has none."""
        return self.cell.method.gamma

    @property
    def task(self) -> str:
        """Key of the task."""
        return self.cell.task.name

    @property
    def seed(self) -> int | None:
        """Seed of a random method, else None."""
        return self.cell.method.seed if self.cell.method.keep == "random" else None

    @property
    def knobs(self) -> Mapping[str, object]:
        """The method's knobs that have an effect, without name, γ and seed."""
        named = ("method", "gamma", "seed")
        knobs = self.cell.method.identity().items()
        return {knob: value for knob, value in knobs if knob not in named}

    @property
    def data(self) -> str:
        """Name of the source of its documents."""
        return self.cell.data

    @cached_property
    def documents(self) -> Mapping[str, tuple[str, Sequence[float], Sequence[int]]]:
        """Per subtask, the hash over its documents, their scores, and their batches if known."""
        parts = sorted(self.part.documents.items())
        return {name: (part.documents, part.correct, part.batches or ()) for name, part in parts}

    @property
    def value(self) -> float:
        """The task's metric as a fraction."""
        return self.part.value

    @property
    def stderr(self) -> float | None:
        """Its standard error over documents, as a fraction."""
        return self.part.stderr

    @property
    def n(self) -> int:
        """Number of documents."""
        return self.part.n

    def write(self) -> None:
        """Seal the record with its checksum and write it, whole or not at all.

        Raises:
            UsageError: If the results directory cannot be written, or the record is invalid: a
                value is not a number, or a field is missing.
        """
        data, root = sealed(self.content), self.path.parents[2]
        try:
            _parsed(data, self.path, root)
        except ValueError as error:
            raise UsageError(f"{self.path}: not written: {error}") from error
        with writing("results_dir", root):
            write_bytes(self.path, data)


def sealed(content: dict[str, Any]) -> bytes:
    """Set the checksum of a record's content and return the bytes of its file.

    The checksum is the SHA-256 of the file with 64 zeros in the checksum's place.
    """
    part = content["capmoe"]
    part["checksum"] = _BLANK
    data = _encoded(content)
    part["checksum"] = hashlib.sha256(data).hexdigest()
    return data.replace(_CHECKSUM % _BLANK.encode(), _CHECKSUM % part["checksum"].encode())


def _encoded(content: dict[str, Any]) -> bytes:
    """Return the bytes of a record's file; NaN in lm-eval's part becomes null, as JSON has none."""
    ours = {"capmoe": content["capmoe"]}
    content = {key: _finite(part) for key, part in content.items() if key != "capmoe"} | ours
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
    return (_NUMBERS.sub(_on_one_line, text) + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _on_one_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def read_record(path: Path, root: Path | None = None) -> Record:
    """Read and validate a record.

    Args:
        path: The file.
        root: The results directory. With it the record must have its cell's path below it; without
            it, its cell's file name.

    Raises:
        UsageError: If the file is truncated, changed, not a record, of another schema, or of
            another cell than its path says; the message is one line and names the file and what to
            do.
    """
    try:
        return _parsed(path.read_bytes(), path, root)
    except OSError as error:
        wrong = f"not a whole record ({error})"
    except ValueError as error:
        wrong = str(error)
    raise UsageError(f"{path}: {' '.join(wrong.split())}; delete it to compute it anew")


def _parsed(data: bytes, path: Path, root: Path | None) -> Record:
    """Return the record that a file holds.

    Raises:
        ValueError: If it holds none; the message says what is wrong.
    """
    from pydantic import ValidationError
    from pydantic_core import from_json

    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not a whole record ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("capmoe"), dict):
        raise ValueError("no record of this suite (it has no 'capmoe' part)")
    schema = content["capmoe"].get("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema {str(schema)[:40]}, this version reads {SCHEMA}")
    record = Record(content, path)
    try:
        checksum = record.part.checksum
    except ValidationError as error:
        raise ValueError(field_problem(error, "capmoe")) from error
    except OverflowError as error:
        raise ValueError("a number of 'capmoe' is too large") from error
    blanked = data.replace(_CHECKSUM % checksum.encode(), _CHECKSUM % _BLANK.encode())
    if hashlib.sha256(blanked).hexdigest() != checksum:
        raise ValueError("it was changed after it was written (its checksum is another)")
    home = record.cell.path(Path())
    here = Path(path.name) if root is None else path.relative_to(root)
    if here != (Path(home.name) if root is None else home):
        raise ValueError(f"the record of another cell, whose place is {home}")
    return record
