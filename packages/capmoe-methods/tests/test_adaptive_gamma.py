"""Adaptive γ: what each factor would drop, and the choice under a budget."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.session import capacity_aware, routed
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wrapper.models import batch, make
from tests.wrapper.test_session import MASK_BS

from capmoe_methods.adaptive_gamma.calibration import Curves
from capmoe_methods.adaptive_gamma.choice import SLACK, Array, choose, grid

GAMMAS = (0.25, 0.5, 1.0, 1.5, 4.0)


@pytest.mark.parametrize(
    ("granularity", "scope", "rounding"),
    [("expert", "batch", "ceil"), ("expert", "sequence", "floor"), ("device", "batch", "ceil")],
)
def test_the_curves_are_those_of_the_definition_and_of_the_method(
    granularity: str, scope: str, rounding: str
) -> None:
    model, tokens_BS = make("olmoe"), batch()
    knobs = {"ep_size": 2, "granularity": granularity, "scope": scope, "rounding": rounding}
    method = create_method("score", "adaptive", budget=0.1, **knobs)  # type: ignore[arg-type]
    sharing = 4 if granularity == "device" else 1
    forwards: list[LayerForward] = []

    class Noted(Curves):
        def see(self, event: LayerForward) -> None:
            super().see(event)
            if event.number == 0:
                forwards.append(event)

    @torch.no_grad()
    def run() -> None:
        model(tokens_BS, attention_mask=MASK_BS)
        model(tokens_BS[:2, :3], attention_mask=MASK_BS[:2, :3])

    with routed(model, method.at(math.inf)) as meter:
        observer = Noted(meter.layers, method, GAMMAS)
        meter.observe(observer)
        run()
    assert not meter.summary()["dropped"], "the stock model drops nothing"
    curve = observer.curves()[0]
    for number, gamma in enumerate(GAMMAS):
        ours = [curve[name][number] for name in ("dropped", "dropped_scores", "straggler")]
        assert ours == pytest.approx(curve_by_loops(forwards, number, sharing), abs=1e-6)
        with capacity_aware(model, method.at(gamma)) as bound:
            run()
        first = bound.report()["layers"][0]  # its tokens are those of the stock model
        assert first["drop_rate"] == pytest.approx(curve["dropped"][number], abs=1e-6)
    assert 0 < curve["dropped"][1] < curve["dropped"][0]
    assert curve["dropped"][-1] == 0
    assert curve["dropped_scores"][1] < curve["dropped"][1], "the lowest scores are dropped"


def curve_by_loops(
    forwards: list[LayerForward], number: int, sharing: int
) -> tuple[float, float, float]:
    """Define a layer's dropped share, dropped share of scores and straggler factor at one γ."""
    pairs = dropped = fullest = 0
    scores = lost = 0.0
    for event in forwards:
        limits = event.plan.capacities(GAMMAS, event.layer, event.scores.topk_TK.device)[number]
        asked = defaultdict(list)
        for group, experts, score_E in zip(
            event.plan.groups.group_T.tolist(),
            event.scores.topk_TK.tolist(),
            event.scores.score_TE.tolist(),
            strict=True,
        ):
            for expert in experts:
                asked[group, expert // sharing].append(score_E[expert])
        load = [0] * (8 // sharing)
        for (group, unit), of_unit in asked.items():
            limit = int(limits[group])
            load[unit] += min(len(of_unit), limit)
            dropped += max(len(of_unit) - limit, 0)
            lost += sum(sorted(of_unit, reverse=True)[limit:])
        pairs += sum(map(len, asked.values()))
        scores += sum(map(sum, asked.values()))
        fullest += max(load)
    return dropped / pairs, lost / scores, fullest * (8 // sharing) / pairs


# The choice of γ by layer, against trying every choice.


def choose_reference(dropped_LX: Array, straggler_LX: Array, budget: float) -> list[int]:
    """Return the best choice within the budget by trying all: of equally good the fewest drops."""
    n_layers, n_gammas = dropped_LX.shape
    choices = map(list, itertools.product(range(n_gammas), repeat=n_layers))
    sums = [(total(straggler_LX, x), total(dropped_LX, x), x) for x in choices]
    return min(each for each in sums if each[1] / n_layers <= budget + SLACK)[2]


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


@settings(deadline=None, max_examples=150)
@given(curves(), st.floats(0, 1))
def test_it_keeps_the_budget_and_is_best_where_the_budget_is_used_up(
    layers: tuple[Array, Array], budget: float
) -> None:
    dropped, straggler = layers
    steps = [choose(dropped, straggler, part / 96) for part in range(97)]
    used_up = {total(dropped, chosen) / len(dropped) for chosen in steps}
    for at in (budget, *used_up):
        chosen, best = choose(dropped, straggler, at), choose_reference(dropped, straggler, at)
        assert total(dropped, chosen) <= at * len(dropped) + len(dropped) * SLACK
        assert total(straggler, chosen) >= total(straggler, best) - 1e-9
        if at != budget:
            assert total(straggler, chosen) == pytest.approx(total(straggler, best))
    # With a larger budget no layer is bounded less.
    for small, large in itertools.pairwise(steps):
        assert total(straggler, large) <= total(straggler, small)
        for layer, (before, after) in enumerate(zip(small, large, strict=True)):
            assert dropped[layer, after] >= dropped[layer, before]


def test_the_grid_ends_where_nothing_binds() -> None:
    assert grid(1.0)[-2:] == (0.95, 1.0)
    assert len(grid(1.0)) == 20
    assert grid(2.0)[-1] == 2.0
    assert grid(2.6)[-3:] == (2.25, 2.5, 2.6)
    assert list(grid(8.0)) == sorted(set(grid(8.0)))
