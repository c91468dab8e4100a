"""What the calibration of adaptive γ depends on, measures and chooses."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.adaptive_gamma import AdaptiveFactor
from capmoe_eval.extensions.adaptive_gamma.calibration import FactorCurves
from capmoe_eval.extensions.adaptive_gamma.curves import Curve
from capmoe_eval.routing.factor import FactorByLayer
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.layers import find_moe_layers
from tests.extensions.calibrations import check_committed, check_knobs
from tests.wrapper.models import make

GAMMAS = (0.5, 1.0, 2.0)
# Two layers: drops of the first cost pairs and hardly a score, those of the second the opposite.
CURVES = (
    Curve("one", [0.4, 0.1, 0.0], [0.02, 0.01, 0.0], [1.0, 2.0, 4.0]),
    Curve("two", [0.02, 0.01, 0.0], [0.4, 0.1, 0.0], [1.5, 3.0, 5.0]),
)
ADAPTIVE = TokenDrop(gamma=AdaptiveFactor(0.02), ep_size=2)


def measured(curves: tuple[Curve, ...] = CURVES) -> FactorCurves:
    observer: Any = SimpleNamespace(gammas=GAMMAS, curves=lambda: curves)
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


def test_every_layer_has_curves_of_its_own() -> None:
    calibration = measured()
    for layer, curve in zip(calibration.layers, CURVES, strict=True):
        assert layer.name == curve.name
        assert layer.dropped == curve.dropped_X
        assert layer.dropped_scores == curve.dropped_scores_X
        assert layer.straggler == curve.straggler_X
    exchanged = chosen(measured(CURVES[::-1]), ADAPTIVE)
    assert exchanged == chosen(calibration, ADAPTIVE)[::-1] == (0.5, 2.0)
    factors = calibration.applied(ADAPTIVE, "file").calibrated
    assert factors.drop_rate == pytest.approx(0.01)  # type: ignore[attr-defined]
    assert factors.dropped_scores == pytest.approx(0.2)  # type: ignore[attr-defined]
    assert factors.straggler == pytest.approx((4.0 + 1.5) / 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_grid_ends_where_nothing_binds(ep_size: int) -> None:
    """At E/K of an expert, and at R of a device."""
    layers = find_moe_layers(make("olmoe"))  # E = 8, K = 3
    for granularity, last in (("expert", 8 / 3), ("device", float(ep_size))):
        method = dataclasses.replace(ADAPTIVE, ep_size=ep_size, granularity=granularity)
        assert FactorCurves.observer(layers, method).gammas[-1] == last


def test_a_calibration_is_of_the_knobs_that_it_depends_on_and_of_no_other() -> None:
    check_knobs(
        ADAPTIVE, {"ep_size", "scope", "granularity", "rounding", "count_padding", "decode"}
    )


@pytest.mark.slow
def test_committed_calibrations_choose_what_their_records_say() -> None:
    check_committed("factor_curves")


def test_a_budget_makes_the_form() -> None:
    adaptive = create_method("score", "adaptive", budget=0.02, ep_size=2)
    assert adaptive == ADAPTIVE and adaptive.label == "score-adaptive0.02-ep2"
    assert create_method("score", budget=0.02, ep_size=2) == ADAPTIVE
    assert adaptive.calibration == "factor_curves"
    identity = adaptive.identity()
    assert (identity["gamma"], identity["budget"], identity["budget_of"]) == (
        *("adaptive", 0.02, "pairs"),
    )


@pytest.mark.parametrize(
    ("gamma", "knobs", "line"),
    [
        ("adaptive", {}, "gamma=adaptive: needs the share that may be dropped, for example budge"),
        (1.0, {"budget": 0.1}, "budget=0.1: is of gamma=adaptive; set that, or leave it out"),
        ("adaptive", {"budget": 2}, "budget=2: must be a number above 0 and below 1"),
        (
            "adaptive",
            {"budget": 0.1, "layer_gammas": [1.0]},
            "layer_gammas=[1.0]: gamma=adaptive chooses them; leave one of the two out",
        ),
    ],
)
def test_a_contradiction_is_refused(gamma: Any, knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        create_method("score", gamma, **knobs)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_a_method_without_capacity_takes_no_budget() -> None:
    with pytest.raises(UsageError, match=r"^gamma=adaptive: method 'expert_drop' has no capacity"):
        create_method("expert_drop", "adaptive", budget=0.1)
    with pytest.raises(UsageError, match=r"^gamma=adaptive: a calibration chooses the γ of each"):
        ADAPTIVE.check_layers(2, n_experts=8, top_k=2)
