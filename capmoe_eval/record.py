"""A record: what a cell produced, as one JSON file that is whole or absent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from capmoe_eval.atomic import write_text
from capmoe_eval.cell import Cell
from capmoe_eval.errors import UsageError, unwritable

SCHEMA = 2
"""Version of the record's ``capmoe`` part; ``docs/results.md`` describes it."""

# Field of the capmoe part → the types that it may have.
_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "cell": (dict,),
    "digest": (str,),
    "value": (int, float),
    "stderr": (int, float, type(None)),
    "n": (int,),
    "documents": (dict,),
    "load": (dict,),
    "layers": (list,),
    "proofs": (dict,),
    "provenance": (dict,),
}
PROOFS = (
    "bound_holds",
    "stock_at_infinity",
    "pads_take_no_slot",
    "overload_drops",
    "every_layer_hooked",
)
"""What every record proves; see ``docs/methods.md``."""

# A list of numbers as json indents it. No string of JSON holds a bare line break.
_NUMBERS = re.compile(r'\[\n([^\[\]{}"]+)\n *\]')


@dataclass(frozen=True)
class Record:
    """lm-eval's result dictionary of one task, plus our ``capmoe`` part.

    Attributes:
        content: The whole JSON object.
        path: Where it lies, or where it will.
    """

    content: dict[str, Any]
    path: Path

    @property
    def capmoe(self) -> dict[str, Any]:
        """The part that is ours."""
        part: dict[str, Any] = self.content["capmoe"]
        return part

    @cached_property
    def cell(self) -> Cell:
        """The cell that produced it."""
        return Cell.from_identity(self.capmoe["cell"])

    # What a table needs (`capmoe_eval.report.fill.Measurement`).

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
        """Where its documents came from."""
        return self.cell.data

    @cached_property
    def documents(self) -> Mapping[str, tuple[str, Sequence[float]]]:
        """Per subtask the hash over its documents and their scores; empty if unreadable."""
        try:
            return {
                name: (str(part["documents"]), [float(score) for score in part["correct"]])
                for name, part in sorted(self.capmoe["documents"].items())
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            return {}

    @property
    def value(self) -> float:
        """The task's metric as a fraction."""
        return float(self.capmoe["value"])

    @property
    def stderr(self) -> float | None:
        """Its standard error over documents, as a fraction."""
        stderr = self.capmoe["stderr"]
        return None if stderr is None else float(stderr)

    @property
    def n(self) -> int:
        """Number of documents."""
        return int(self.capmoe["n"])

    def write(self) -> None:
        """Write the record, whole or not at all.

        Raises:
            UsageError: If the results directory cannot be written.
        """
        text = json.dumps(self.content, indent=1, sort_keys=True, ensure_ascii=False)
        try:
            write_text(self.path, _NUMBERS.sub(_on_one_line, text) + "\n")
        except OSError as error:
            raise unwritable("results_dir", self.path.parents[2], error) from error


def _on_one_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def read_record(path: Path) -> Record:
    """Read and validate a record.

    Raises:
        UsageError: If the file is truncated, is no record, or has another schema; the message names
            the file and what to do.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: not a whole record ({error}); delete it to compute it anew"
        ) from (error)
    problem = _problem(content)
    if problem:
        raise UsageError(f"{path}: {problem}; delete it to compute it anew")
    record = Record(content, path)
    try:
        digest = record.cell.digest
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: its cell cannot be read ({error}); delete it to compute it anew"
        ) from error
    if digest != record.capmoe["digest"]:
        raise UsageError(
            f"{path}: its cell has digest {digest}, the record says {record.capmoe['digest']}; "
            "delete it to compute it anew"
        )
    return record


def _problem(content: object) -> str | None:
    """Return what is wrong with a record's content, or None."""
    if not isinstance(content, dict) or not isinstance(content.get("capmoe"), dict):
        return "no record of this suite (it has no 'capmoe' part)"
    part = content["capmoe"]
    if part.get("schema") != SCHEMA:
        return f"schema {part.get('schema')!r}, this version reads {SCHEMA}"
    for field, types in _FIELDS.items():
        if field not in part:
            return f"field 'capmoe.{field}' is missing"
        if not isinstance(part[field], types) or isinstance(part[field], bool):
            return f"field 'capmoe.{field}' has the wrong type ({type(part[field]).__name__})"
    missing = [name for name in PROOFS if not isinstance(part["proofs"].get(name), dict)]
    return f"proofs {', '.join(missing)} are missing" if missing else None
