"""What each γ would drop in a layer of the stock model, as loops count it."""

from __future__ import annotations

import math

import pytest
import torch
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.session import capacity_aware, routed
from tests.wrapper.models import batch, make
from tests.wrapper.test_session import MASK_BS

from capmoe_methods.adaptive_gamma.calibration import Curves


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
