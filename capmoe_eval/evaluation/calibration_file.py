"""A calibration: a file of what the layers of the stock model did, which a method routes by.

It is of a model, a task, its batches and some knobs of the method, and of documents that no
evaluation of the task asks. Each subclass is a kind of calibration. The package of the method that
needs a kind registers it by its name (:func:`capmoe_eval.routing.registry.register_calibration`).
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import Field, ValidationError
from pydantic_core import from_json
from torch import Tensor

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.record_part import Calibrated, Count, Part, Positive
from capmoe_eval.experiment.results import CALIBRATIONS
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import calibrations
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer

Counted: TypeAlias = Sequence[Mapping[str, Any]]
"""What a meter reports of each layer."""
SCHEMA: Final = 1
DOCUMENTS: Final = 128
"""Documents of a calibration; of a task with parts, as many of each as make up about that many."""


@dataclass(frozen=True)
class Applied:
    """A method after its calibration."""

    method: Method  # as it runs
    calibrated: Calibrated  # for the record
    # What the decisions of each MoE layer need: see `calibrated` of `capacity_aware`.
    layers: tuple[Tensor, ...] | None = None


class Calibration(Part, ABC):
    """The file of a calibration; a kind adds what it measured of each layer."""

    asked_by: ClassVar[str]  # the setting that needs this kind
    stem: ClassVar[str]  # of the file's name after the task's, a format of the method
    constants: ClassVar[dict[str, Any]]  # of the kind, on which the measurement depends
    # Of the method, on which it does.
    knobs: ClassVar[tuple[str, ...]] = ("count_padding", "decode")

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    of: dict[str, Any]  # what it is of: see :meth:`identity_of`
    split: str  # of the documents: dev of an embedded world, else validation or train
    documents: Positive
    prompts: str  # a hash over their prompts
    tokens: Positive
    forwards: Count
    weights: str  # the hash of the model's weights, as in a record's provenance

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Observer:
        """Return what measures a run of the stock model, for a method, beside what it counts."""
        return Observer()

    @classmethod
    @abstractmethod
    def measured(cls, observer: Any, layers: Counted) -> dict[str, Any]:
        """Return the fields that this kind adds to the file, after the run."""

    def needed(self, method: Method) -> tuple[Tensor, ...] | None:
        """Return what the decisions of each MoE layer need, by a method."""

    def applied(self, method: Method, file: str) -> Applied:
        """Return a method as it runs by this calibration, whose path below the results is given."""
        calibrated = Calibrated(file=file, checksum=self.checksum)
        return Applied(method, calibrated, self.needed(method))

    @classmethod
    def identity_of(cls, cell: Cell) -> dict[str, Any]:
        """Return all that a cell's calibration depends on, JSON-ready."""
        fields = cell.identity()
        return {
            "model": fields["model"],
            "task": fields["task"],
            **{key: fields[key] for key in ("data", "batch_size", "shuffle", "eval_seed")},
            **{knob: getattr(cell.method, knob) for knob in cls.knobs},
            **cls.constants,
            "documents": DOCUMENTS,
        }

    @classmethod
    def path_of(cls, root: Path, cell: Cell) -> Path:
        """Return the path of a cell's calibration under a results directory."""
        canonical = json.dumps(cls.identity_of(cell), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
        name = f"{cell.task.name}-{cls.stem.format(cell.method)}-{digest}.json"
        return root / cell.model.name / CALIBRATIONS / name

    @property
    def checksum(self) -> str:
        """The SHA-256 of the content."""
        content = self.model_dump(mode="json", by_alias=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        content = self.model_dump(mode="json", by_alias=True) | {"checksum": self.checksum}
        with writing("results_dir", path.parents[2]):
            write_text(path, json.dumps(content, sort_keys=True) + "\n")

    @classmethod
    def read(cls, path: Path, cell: Cell, weights: str) -> Calibration:
        """Read a cell's calibration.

        Raises:
            UsageError: If it is not whole, of something else, or of a model with other weights.
        """
        try:
            content = from_json(read_bytes(path), allow_inf_nan=False)
            checksum = content.pop("checksum", None)
            calibration = cls(**content)
            if calibration.checksum != checksum:
                raise ValueError("it was changed after it was written (its checksum is another)")
            if calibration.schema_ != SCHEMA:
                raise ValueError(f"schema {calibration.schema_}, this version reads {SCHEMA}")
            if calibration.of != cls.identity_of(cell):
                raise ValueError("it is of another model, task or grouping than its name says")
            if calibration.weights != weights:
                raise ValueError(f"it is of other weights ({calibration.weights}, now {weights})")
        except ValidationError as error:
            wrong = field_problem(error)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            wrong = str(error)
        else:
            return calibration
        raise UsageError(
            f"{path}: {' '.join(wrong.split())}; delete it to compute it anew, and the results of "
            f"{cls.asked_by} with it"
        )


def calibration_kind(name: str) -> type[Calibration]:
    """Return the class of a kind of calibration, which is imported now."""
    kind: type[Calibration] = pkgutil.resolve_name(calibrations()[name])
    return kind


def kind_of(method: Method) -> type[Calibration] | None:
    """Return the kind of calibration that a method needs, or None."""
    return None if method.calibration is None else calibration_kind(method.calibration)


def rounded_shares(values: Sequence[float]) -> list[float]:
    """Return shares without the digits in which a sum's order shows."""
    return [min(max(round(value, 6), 0.0), 1.0) for value in values]
