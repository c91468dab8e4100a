"""A capacity factor for each layer: bounds, proofs and records follow the layer's own."""

from __future__ import annotations

import math

import pytest
import torch

from capmoe_eval.errors import EnforcementError
from capmoe_eval.extensions.adaptive_gamma.calibration import Curves
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.session import capacity_aware, routed
from tests.wrapper.models import batch, logits, make

MASK_BS = torch.arange(12) < torch.tensor([[12], [7], [12], [9]])


def test_each_layer_follows_its_own_gamma() -> None:
    model, loads = make("olmoe"), {}
    for key, factors in {
        "both": {"layer_gammas": (0.5, 1.5)},
        "low": {"gamma": 0.5},
        "open": {"layer_gammas": (math.inf, 0.5)},
    }.items():
        with capacity_aware(model, "score", **factors) as meter:
            logits(model, attention_mask=MASK_BS)
            logits(model, batch().flip(1), attention_mask=MASK_BS.flip(1))
        loads[key] = meter.report()
        assert loads[key]["proofs"]["bound_holds"]["passed"]
    first, second = loads["both"]["layers"]
    assert [first["gamma"], second["gamma"]] == [0.5, 1.5]
    assert first["effective_gamma"] < 0.7
    assert second["effective_gamma"] > 1.4
    assert first | {"gamma": None} == loads["low"]["layers"][0] | {"gamma": None}
    assert second != loads["low"]["layers"][1], "the layer's own γ changes nothing"
    assert 0 < loads["both"]["summary"]["effective_gamma"] < 1.5
    unbounded = loads["open"]["layers"][0]
    assert (unbounded["gamma"], unbounded["dropped"]) == ("inf", 0)
    assert loads["open"]["layers"][1]["dropped"]


def test_the_invariant_is_held_against_the_layers_own_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer 1 is decided at layer 0's larger γ."""
    model, decide, loose = make("olmoe"), hook.decide, create_method("score", 1.5)
    with capacity_aware(model, "score", layer_gammas=(1.5, 0.5)) as meter:
        monkeypatch.setattr(
            hook, "decide", lambda scores, _, groups, **more: decide(scores, loose, groups, **more)
        )
        with pytest.raises(EnforcementError, match=r"enforced: model\.layers\.1\.\S+: bound_holds"):
            logits(model, attention_mask=MASK_BS)
    assert meter.report()["layers"][0]["violations"] == 0


def test_equal_factors_are_one() -> None:
    assert create_method("score", layer_gammas=[1, 1.0]) == create_method("score", 1.0)
    assert create_method("score", layer_gammas=(math.inf, math.inf)) == create_method("baseline")
    several = create_method("score", layer_gammas=[1, math.inf], ep_size=2)
    identity = several.identity()
    assert identity.pop("method") == "score"
    assert identity["layer_gammas"] == [1.0, "inf"]
    assert create_method("score", **identity) == several
    assert several.of_layer(1).ep_size == 2, "a layer without a capacity has the groups of others"


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
