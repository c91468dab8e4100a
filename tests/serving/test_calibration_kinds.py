"""What each kind of calibration depends on, measures and chooses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.routing.method import DEFAULTS, Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.serving.calibration_kinds import KINDS, FactorCurves
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.observers.curves import Curve
from tests.wrapper.models import make

GAMMAS = (0.5, 1.0, 2.0)
# Two layers: drops of the first cost pairs and hardly a score, those of the second the opposite.
CURVES = (
    Curve("one", [0.4, 0.1, 0.0], [0.02, 0.01, 0.0], [1.0, 2.0, 4.0]),
    Curve("two", [0.02, 0.01, 0.0], [0.4, 0.1, 0.0], [1.5, 3.0, 5.0]),
)
ADAPTIVE = create_method("score", "adaptive", budget=0.02, ep_size=2)  # type: ignore[arg-type]
METHODS = {
    "expert_loads": create_method("score", 1.0, ep_size=2, granularity="device", placement="eplb"),
    "expert_modalities": create_method("macs", 1.0, ep_size=2),
    "factor_curves": ADAPTIVE,
    "expert_similarity": create_method("sere"),
}
"""A method that needs each kind."""
OTHERS: dict[str, Any] = {
    "ep_size": 4,
    "scope": "sequence",
    "granularity": "device",
    "rounding": "floor",
    "count_padding": True,
    "decode": "constrained",
}


def measured(curves: tuple[Curve, ...] = CURVES) -> FactorCurves:
    observer: Any = SimpleNamespace(gammas=GAMMAS, curves=lambda: curves)
    about = {"split": "train", "documents": 8, "prompts": "p", "tokens": 9, "forwards": 2}
    fields = FactorCurves.measured(observer, [])
    return FactorCurves(of={}, weights="w", **about, **fields)  # type: ignore[arg-type]


def chosen(calibration: FactorCurves, method: Method) -> tuple[float, ...]:
    factors = calibration.applied(method, "file").method.layer_gammas
    assert factors is not None
    return factors


def test_a_budget_is_of_what_it_names() -> None:
    """A budget of pairs goes to the layer whose drops are few, one of scores to the other."""
    calibration = measured()
    of_scores = dataclasses.replace(ADAPTIVE, budget_of="scores")
    assert chosen(calibration, ADAPTIVE) == (2.0, 0.5)
    assert chosen(calibration, of_scores) == (0.5, 2.0)


def test_every_layer_has_curves_of_its_own() -> None:
    calibration = measured()
    for layer, curve in zip(calibration.layers, CURVES, strict=True):
        assert layer.name == curve.name
        assert layer.dropped == curve.dropped_X
        assert layer.dropped_scores == curve.dropped_scores_X
        assert layer.straggler == curve.straggler_X
    exchanged = chosen(measured(CURVES[::-1]), ADAPTIVE)
    assert exchanged == chosen(calibration, ADAPTIVE)[::-1] == (0.5, 2.0)
    found = calibration.applied(ADAPTIVE, "file").calibrated
    assert found.drop_rate == pytest.approx(0.01)  # type: ignore[attr-defined]
    assert found.dropped_scores == pytest.approx(0.2)  # type: ignore[attr-defined]
    assert found.straggler == pytest.approx((4.0 + 1.5) / 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_grid_ends_where_nothing_binds(ep_size: int) -> None:
    """At E/K of an expert, and at R of a device."""
    layers = find_moe_layers(make("olmoe"))  # E = 8, K = 3
    for granularity, last in (("expert", 8 / 3), ("device", float(ep_size))):
        method = dataclasses.replace(ADAPTIVE, ep_size=ep_size, granularity=granularity)
        assert FactorCurves.observer(layers, method).gammas[-1] == last


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_is_of_the_knobs_that_it_depends_on_and_of_no_other(kind: str) -> None:
    """Whether a decision of the stock model is measured otherwise says which these are."""
    method, calibration = METHODS[kind], KINDS[kind]
    depends = {"count_padding", "decode"}
    if kind == "factor_curves":
        depends |= {"ep_size", "scope", "granularity", "rounding"}
    path = calibration.path_of(Path(), cell(method))
    for knob, value in OTHERS.items():
        if getattr(method, knob) != DEFAULTS[knob] and knob != "ep_size":
            continue
        other = dataclasses.replace(method, **{knob: value})
        if getattr(other, knob) == getattr(method, knob):
            continue  # it has no effect on the method
        assert (calibration.path_of(Path(), cell(other)) != path) == (knob in depends), knob
    assert path == calibration.path_of(Path(), cell(method))


def cell(method: Method) -> Cell:
    images = method.weighs_tokens
    task = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0, images=images)
    return Cell(ModelId("tiny", "tiny:olmoe", dtype="float32"), method, task, 4, 4, "synthetic")
