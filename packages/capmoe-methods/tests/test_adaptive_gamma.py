"""Adaptive γ: what each factor would drop, and the choice under a budget."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from capmoe_eval.routing.capacity import CapacityFactor
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.session import capacity_aware, routed
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wrapper.models import batch, make
from tests.wrapper.test_session import MASK_BS

from capmoe_methods.adaptive_gamma import AdaptiveFactor
from capmoe_methods.adaptive_gamma.calibration import Curves, FactorCurves, LayerCurve
from capmoe_methods.adaptive_gamma.choice import SLACK, Array, choose, grid, hull

# What each γ would drop in a layer of the stock model, as loops count it.


@pytest.mark.parametrize(
    ("granularity", "scope", "rounding"),
    [("expert", "batch", "ceil"), ("expert", "sequence", "floor"), ("device", "batch", "ceil")],
)
def test_the_curves_are_those_of_the_definition_and_of_the_method(
    granularity: str, scope: str, rounding: str
) -> None:
    model = make("olmoe")
    tokens_BS, mask_BS = batch(), MASK_BS
    gammas = (0.25, 0.5, 1.0, 1.5, 4.0)
    knobs = {"ep_size": 2, "granularity": granularity, "scope": scope, "rounding": rounding}
    method = create_method("score", "adaptive", budget=0.1, **knobs)
    asked: list[list[tuple[int, int, float]]] = []
    limits: list[list[list[int]]] = []

    def note(event: LayerForward) -> None:
        see(event)
        if event.number:
            return
        plan, layer, scores = event.plan, event.layer, event.scores
        limits.append(plan.capacities(gammas, layer, scores.topk_TK.device).tolist())
        asked.append(
            [
                (group, expert // sharing, score)
                for group, experts, row in zip(
                    plan.groups.group_T.tolist(),
                    scores.topk_TK.tolist(),
                    scores.score_TE.tolist(),
                    strict=True,
                )
                for expert in experts
                for score in [row[expert]]
            ]
        )

    sharing = 4 if granularity == "device" else 1
    with routed(model, method.at(math.inf)) as meter, torch.no_grad():
        curve = Curves(meter.layers, method, gammas)
        see = curve.see
        curve.see = note  # type: ignore[method-assign]
        meter.observe(curve)
        model(tokens_BS, attention_mask=mask_BS)
        model(tokens_BS[:2, :3], attention_mask=mask_BS[:2, :3])
    assert not meter.summary()["dropped"], "the stock model drops nothing"
    results = curve.curves()[0]
    for number, gamma in enumerate(gammas):
        expected = curve_reference(asked, [of[number] for of in limits], 8 // sharing)
        ours = (results.dropped, results.dropped_scores, results.straggler)
        assert [part[number] for part in ours] == pytest.approx(expected, abs=1e-6)
        with capacity_aware(model, method.at(gamma)) as bound, torch.no_grad():
            model(tokens_BS, attention_mask=mask_BS)
            model(tokens_BS[:2, :3], attention_mask=mask_BS[:2, :3])
        first = bound.report()["layers"][0]  # its tokens are those of the stock model
        assert first["drop_rate"] == pytest.approx(results.dropped[number], abs=1e-6)
    assert 0 < results.dropped[1] < results.dropped[0]
    assert results.dropped[-1] == 0
    assert results.dropped_scores[1] < results.dropped[1], "the lowest scores are dropped"


def curve_reference(
    forwards: list[list[tuple[int, int, float]]], limits: list[list[int]], units: int
) -> tuple[float, float, float]:
    """Define one layer's dropped share, dropped share of scores and straggler factor by loops.

    Args:
        forwards: For each forward its pairs: capacity group, unit, and gate score.
        limits: For each forward the capacity of a unit in every group.
        units: Number of units.
    """
    pairs = dropped = fullest = 0
    scores = lost = 0.0
    for asked, limit_G in zip(forwards, limits, strict=True):
        load = [0] * units
        for group, limit in enumerate(limit_G):
            for unit in range(units):
                best_first = sorted((s for g, u, s in asked if (g, u) == (group, unit)))[::-1]
                load[unit] += min(len(best_first), limit)
                dropped += max(len(best_first) - limit, 0)
                lost += sum(best_first[limit:])
        pairs += len(asked)
        scores += sum(score for _, _, score in asked)
        fullest += max(load)
    return dropped / pairs, lost / scores, fullest * units / pairs


# The choice of γ by layer, against trying every choice.


def choose_reference(dropped_LX: Array, straggler_LX: Array, budget: float) -> list[int]:
    """Return the best choice within the budget by trying all: of equally good the fewest drops."""
    n_layers, n_gammas = dropped_LX.shape
    rows = np.arange(n_layers)
    choices = itertools.product(range(n_gammas), repeat=n_layers)
    sums = [(dropped_LX[rows, x].sum(), straggler_LX[rows, x].sum(), x) for x in map(list, choices)]
    within = [each for each in sums if each[0] / n_layers <= budget + SLACK]
    return min(within, key=lambda each: (each[1], each[0]))[2]


@st.composite
def curves(draw: st.DrawFn) -> tuple[Array, Array]:
    """Layers by rising γ: drops fall to none, straggler factors rise; few values make ties."""
    n_layers, n_gammas = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dropped, stragglers = [], []
    for _ in range(n_layers):
        falling = sorted(draw(st.lists(st.integers(0, 16), min_size=n_gammas, max_size=n_gammas)))
        rising = sorted(draw(st.lists(st.integers(0, 40), min_size=n_gammas, max_size=n_gammas)))
        dropped.append([*(n / 16 for n in falling[:0:-1]), 0.0])
        stragglers.append([n / 8 for n in rising])
    return np.array(dropped), np.array(stragglers)


def total(curve: Array, chosen: list[int]) -> float:
    return float(curve[np.arange(len(chosen)), chosen].sum())


def hull_budgets(dropped: Array, straggler: Array) -> list[float]:
    """The budgets that some number of steps uses up."""
    choices = [choose(dropped, straggler, budget / 96) for budget in range(97)]
    return sorted({total(dropped, chosen) / len(dropped) for chosen in choices})


@settings(deadline=None, max_examples=150)
@given(curves(), st.floats(0, 1))
def test_it_keeps_the_budget_and_is_best_where_the_budget_is_used_up(
    layers: tuple[Array, Array], budget: float
) -> None:
    dropped, straggler = layers
    for at in (budget, *hull_budgets(dropped, straggler)):
        chosen, best = choose(dropped, straggler, at), choose_reference(dropped, straggler, at)
        assert total(dropped, chosen) <= at * len(dropped) + len(dropped) * SLACK
        assert total(straggler, chosen) >= total(straggler, best) - 1e-9
        if at != budget:
            assert total(straggler, chosen) == pytest.approx(total(straggler, best))


@settings(deadline=None, max_examples=150)
@given(curves(), st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_with_a_larger_budget_no_layer_is_bounded_less(
    layers: tuple[Array, Array], budgets: list[float]
) -> None:
    chosen = [choose(*layers, budget) for budget in sorted(budgets)]
    for small, large in itertools.pairwise(chosen):
        assert total(layers[1], large) <= total(layers[1], small)
        for layer, (before, after) in enumerate(zip(small, large, strict=True)):
            assert layers[0][layer, after] >= layers[0][layer, before]


@given(curves())
def test_a_hull_is_convex_and_below_every_point(layers: tuple[Array, Array]) -> None:
    for dropped, straggler in zip(*layers, strict=True):
        points = hull(dropped, straggler)
        d, s = dropped[points], straggler[points]
        assert (np.diff(d) > 0).all()
        assert (np.diff(s) < 0).all()
        assert (np.diff(np.diff(s) / np.diff(d)) > -1e-12).all()
        within = dropped <= d[-1]
        assert (straggler[within] >= np.interp(dropped[within], d, s) - 1e-9).all()


def test_the_grid_ends_where_nothing_binds() -> None:
    assert grid(1.0)[-2:] == (0.95, 1.0)
    assert len(grid(1.0)) == 20
    assert grid(2.0)[-1] == 2.0
    assert grid(2.6)[-3:] == (2.25, 2.5, 2.6)
    assert list(grid(8.0)) == sorted(set(grid(8.0)))


# What the calibration of adaptive γ measures and chooses.


GAMMAS = (0.5, 1.0, 2.0)
FEW, MANY = [0.02, 0.01, 0.0], [0.4, 0.1, 0.0]
# Two layers: drops of the first cost pairs and hardly a score, those of the second the opposite.
CURVES = (
    LayerCurve(name="one", dropped=MANY, dropped_scores=FEW, straggler=[1.0, 2.0, 4.0]),
    LayerCurve(name="two", dropped=FEW, dropped_scores=MANY, straggler=[1.5, 3.0, 5.0]),
)
ADAPTIVE = TokenDrop(gamma=AdaptiveFactor(budget=0.02), ep_size=2)


def measured(curves: tuple[LayerCurve, ...] = CURVES) -> FactorCurves:
    observer: Any = SimpleNamespace(gammas=GAMMAS, curves=lambda: list(curves))
    about = {"split": "train", "documents": 8, "prompts": "p", "tokens": 9, "forwards": 2}
    fields = FactorCurves.measured(observer, [])
    return FactorCurves(of={}, weights="w", **about, **fields)  # type: ignore[arg-type]


def chosen(calibration: FactorCurves, method: Method) -> tuple[float, ...]:
    factor = calibration.applied(method, "file").method.factor
    assert isinstance(factor, CapacityFactor)
    assert isinstance(factor.gamma, tuple)
    return factor.gamma


def test_a_budget_is_of_what_it_names() -> None:
    """A budget of pairs goes to the layer whose drops are few, one of scores to the other."""
    calibration = measured()
    of_scores = ADAPTIVE.at(AdaptiveFactor(budget=0.02, budget_of="scores"))
    assert chosen(calibration, ADAPTIVE) == (2.0, 0.5)
    assert chosen(calibration, of_scores) == (0.5, 2.0)
