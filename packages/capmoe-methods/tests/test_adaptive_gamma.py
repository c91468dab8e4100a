"""What the calibration of adaptive γ measures and chooses."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from capmoe_eval.routing.factor import FactorByLayer
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.wrapper.layers import find_moe_layers
from tests.wrapper.models import make

from capmoe_methods.adaptive_gamma import AdaptiveFactor
from capmoe_methods.adaptive_gamma.calibration import FactorCurves, LayerCurve

GAMMAS = (0.5, 1.0, 2.0)
FEW, MANY = [0.02, 0.01, 0.0], [0.4, 0.1, 0.0]
# Two layers: drops of the first cost pairs and hardly a score, those of the second the opposite.
CURVES = (
    LayerCurve(name="one", dropped=MANY, dropped_scores=FEW, straggler=[1.0, 2.0, 4.0]),
    LayerCurve(name="two", dropped=FEW, dropped_scores=MANY, straggler=[1.5, 3.0, 5.0]),
)
ADAPTIVE = TokenDrop(gamma=AdaptiveFactor(0.02), ep_size=2)


def measured(curves: tuple[LayerCurve, ...] = CURVES) -> FactorCurves:
    observer: Any = SimpleNamespace(gammas=GAMMAS, curves=lambda: list(curves))
    about = {"split": "train", "documents": 8, "prompts": "p", "tokens": 9, "forwards": 2}
    fields = FactorCurves.measured(observer, [])
    return FactorCurves(of={}, weights="w", **about, **fields)  # type: ignore[arg-type]


def chosen(calibration: FactorCurves, method: Method) -> tuple[float, ...]:
    factor = calibration.applied(method, "file").method.factor
    assert isinstance(factor, FactorByLayer)
    return factor.gammas


def test_a_budget_is_of_what_it_names() -> None:
    """A budget of pairs goes to the layer whose drops are few, one of scores to the other."""
    calibration = measured()
    of_scores = ADAPTIVE.at(AdaptiveFactor(0.02, "scores"))
    assert chosen(calibration, ADAPTIVE) == (2.0, 0.5)
    assert chosen(calibration, of_scores) == (0.5, 2.0)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_grid_ends_where_nothing_binds(ep_size: int) -> None:
    """At E/K of an expert, and at R of a device."""
    layers = find_moe_layers(make("olmoe"))  # E = 8, K = 3
    for granularity, last in (("expert", 8 / 3), ("device", float(ep_size))):
        method = dataclasses.replace(ADAPTIVE, ep_size=ep_size, granularity=granularity)
        assert FactorCurves.observer(layers, method).gammas[-1] == last
