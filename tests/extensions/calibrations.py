"""Check what a kind of calibration depends on, and that those of committed records can be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.results import CALIBRATIONS
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.calibration import kind_of

RESULTS = Path(__file__).parents[2] / "results" / "zoo"
OTHERS: dict[str, Any] = {
    "ep_size": 4,
    "scope": "sequence",
    "granularity": "device",
    "rounding": "floor",
    "count_padding": True,
    "decode": "constrained",
}
"""Another value of each knob on which a measurement of the stock model may depend."""


def check_knobs(method: Method, depends: set[str]) -> None:
    """Check that a method's calibration is of the knobs on which it depends, and of no other."""
    kind = kind_of(method)
    assert kind is not None
    path = kind.path_of(Path(), cell(method))
    declared = declared_knobs(type(method))
    tried = set()
    for knob in OTHERS.keys() & declared.keys():
        other = dataclasses.replace(method, **{knob: OTHERS[knob]}).canonical()  # type: ignore[type-var]
        if getattr(other, knob) == getattr(method, knob):
            continue  # it has no effect on the method
        assert (kind.path_of(Path(), cell(other)) != path) == (knob in depends), knob
        tried.add(knob)
    assert tried >= depends & declared.keys()
    assert path == kind.path_of(Path(), cell(method))


def cell(method: Method) -> Cell:
    """Return a cell of a method, on a task with images."""
    task = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0, images=True)
    return Cell(ModelId("tiny", "tiny:olmoe", dtype="float32"), method, task, 4, 4, "synthetic")


def check_committed(kind: str) -> None:
    """Check that the calibrations of committed records are read, and applied as the records say."""
    if not RESULTS.is_dir():
        pytest.skip("the results are in the repository alone")
    calibrations = set()
    for path in RESULTS.glob("*/*/*.json"):
        content = path.read_bytes()
        if path.parent.name == CALIBRATIONS or b'"calibration": {' not in content:
            continue
        record = from_json(content)["capmoe"]
        cell = Cell.from_identity(record["cell"])
        if cell.method.calibration != kind:
            continue
        calibration = kind_of(cell.method)
        assert calibration is not None
        place = calibration.path_of(RESULTS, cell)
        file = place.relative_to(RESULTS).as_posix()
        measured = calibration.read(place, cell, record["provenance"]["model"]["weights"])
        applied = measured.applied(cell.method, file).calibrated.model_dump(mode="json")
        assert applied == record["calibration"]
        calibrations.add(file)
    assert calibrations
