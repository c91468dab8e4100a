"""The choice of γ by layer, against trying every choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_methods.adaptive_gamma.choice import SLACK, Array, choose, grid, hull


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
    found = [choose(dropped, straggler, budget / 96) for budget in range(97)]
    return sorted({total(dropped, chosen) / len(dropped) for chosen in found})


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
