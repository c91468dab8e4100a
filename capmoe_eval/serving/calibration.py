"""A calibration: what every capacity factor would do to a model's layers, measured once.

It is of a model, a task, its batches and its capacity groups, and of documents that no evaluation
of the task asks. ``gamma=adaptive`` chooses from it, for any budget.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, ValidationError, model_validator
from pydantic_core import from_json

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.record_part import Amount, Calibrated, Count, Part, Positive, Share
from capmoe_eval.experiment.results import CALIBRATIONS
from capmoe_eval.routing.method import Adaptive, Method
from capmoe_eval.serving.adaptive import Array, choose

SCHEMA: Final = 1
DOCUMENTS: Final = 128
"""Documents of a calibration; of a task with parts, as many of each as make up about that many."""

_GROUPING = ("ep_size", "scope", "granularity", "rounding", "count_padding", "decode")


class LayerCurve(Part):
    """One layer at each capacity factor; see :class:`capmoe_eval.wrapper.curve_meter.Curve`."""

    name: str
    dropped: list[Share]
    dropped_scores: list[Share]
    straggler: list[Amount]


class Calibration(Part):
    """The file of a calibration."""

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    of: dict[str, Any]  # the identity of what it is of: see :func:`calibration_identity`
    split: str  # of the documents: dev of an embedded world, else validation or train
    documents: Positive
    prompts: str  # a hash over their prompts
    tokens: Positive
    forwards: Count
    weights: str  # the hash of the model's weights, as in a record's provenance
    gammas: Annotated[list[Amount], Field(min_length=1)]
    layers: Annotated[list[LayerCurve], Field(min_length=1)]

    @model_validator(mode="after")
    def _as_long(self) -> Calibration:
        for layer in self.layers:
            for name in ("dropped", "dropped_scores", "straggler"):
                if len(getattr(layer, name)) != len(self.gammas):
                    raise ValueError(f"{layer.name}.{name} is not as long as gammas")
        return self

    @property
    def checksum(self) -> str:
        """The SHA-256 of the content."""
        content = self.model_dump(mode="json", by_alias=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _of(self, name: str) -> Array:
        return np.array([getattr(layer, name) for layer in self.layers])

    def dropped(self, of: str) -> Array:
        """Return the share of ``pairs`` or ``scores`` that is dropped [layers, gammas]."""
        return self._of({"pairs": "dropped", "scores": "dropped_scores"}[of])

    @property
    def straggler(self) -> Array:
        """The straggler factor [layers, gammas]."""
        return self._of("straggler")


@dataclass(frozen=True)
class Adapted:
    """An adaptive method after the choice."""

    method: Method  # with the γ of every layer
    calibrated: Calibrated


def calibration_identity(cell: Cell) -> dict[str, Any]:
    """Return all of a cell that its calibration depends on, JSON-ready."""
    fields = cell.identity()
    return {
        "model": fields["model"],
        "task": fields["task"],
        **{key: fields[key] for key in ("data", "batch_size", "shuffle", "eval_seed")},
        **{knob: getattr(cell.method, knob) for knob in _GROUPING},
        "documents": DOCUMENTS,
    }


def calibration_path(root: Path, cell: Cell) -> Path:
    """Return the path of a cell's calibration under a results directory."""
    canonical = json.dumps(calibration_identity(cell), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
    name = f"{cell.task.name}-ep{cell.method.ep_size}-{digest}.json"
    return root / cell.model.name / CALIBRATIONS / name


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration, whole or not at all."""
    content = calibration.model_dump(mode="json", by_alias=True)
    content["checksum"] = calibration.checksum
    with writing("results_dir", path.parents[2]):
        write_text(path, json.dumps(content, sort_keys=True) + "\n")


def read_calibration(path: Path, cell: Cell, weights: str) -> Calibration:
    """Read a cell's calibration.

    Raises:
        UsageError: If it is not whole, of something else, or of a model with other weights.
    """
    try:
        content = from_json(path.read_bytes(), allow_inf_nan=False)
        checksum = content.pop("checksum", None)
        calibration = Calibration(**content)
        if calibration.checksum != checksum:
            raise ValueError("it was changed after it was written (its checksum is another)")
        if calibration.schema_ != SCHEMA:
            raise ValueError(f"schema {calibration.schema_}, this version reads {SCHEMA}")
        if calibration.of != calibration_identity(cell):
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
        "gamma=adaptive with it"
    )


def adapted(method: Method, calibration: Calibration, file: str) -> Adapted:
    """Choose the γ of every layer for an adaptive method.

    Args:
        method: The method, with a budget.
        calibration: What to choose from.
        file: Its path, below the results directory.
    """
    rule = method.factor
    assert isinstance(rule, Adaptive)
    chosen = choose(calibration.dropped(rule.budget_of), calibration.straggler, rule.budget)
    gammas = [calibration.gammas[x] for x in chosen]
    layers = np.arange(len(chosen))
    drop_rate, dropped_scores, straggler = (
        math.fsum(curve[layers, chosen]) / len(chosen)
        for curve in (
            calibration.dropped("pairs"),
            calibration.dropped("scores"),
            calibration.straggler,
        )
    )
    return Adapted(
        method.at(None, tuple(gammas)),
        Calibrated(
            file=file,
            checksum=calibration.checksum,
            gammas=gammas,
            drop_rate=drop_rate,
            dropped_scores=dropped_scores,
            straggler=straggler,
        ),
    )
