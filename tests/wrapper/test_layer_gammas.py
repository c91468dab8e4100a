"""A capacity factor for each layer: bounds, proofs and records follow the layer's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.extensions.adaptive_gamma.curves import Curves, curve_reference
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import TokenGroups
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.session import capacity_aware, routed
from tests.wrapper.models import batch, make

MASK_BS = torch.arange(12) < torch.tensor([[12], [7], [12], [9]])


def test_each_layer_follows_its_own_gamma() -> None:
    model = make("olmoe")
    tokens_BS, mask_BS = batch(), MASK_BS
    loads = {}
    for key, factors in {
        "both": {"layer_gammas": (0.5, 1.5)},
        "low": {"gamma": 0.5},
        "open": {"layer_gammas": (math.inf, 0.5)},
    }.items():
        with capacity_aware(model, "score", **factors) as meter, torch.no_grad():
            model(tokens_BS, attention_mask=mask_BS)
            model(tokens_BS.flip(1), attention_mask=mask_BS.flip(1))
        loads[key] = meter.report()
        assert loads[key]["proofs"]["bound_holds"]["passed"]
    first, second = loads["both"]["layers"]
    assert [first["gamma"], second["gamma"]] == [0.5, 1.5]
    assert first["effective_gamma"] < 0.7 and second["effective_gamma"] > 1.4
    assert first | {"gamma": None} == loads["low"]["layers"][0] | {"gamma": None}
    assert second != loads["low"]["layers"][1], "the layer's own γ changes nothing"
    assert 0 < loads["both"]["summary"]["effective_gamma"] < 1.5
    unbounded = loads["open"]["layers"][0]
    assert unbounded["gamma"] == "inf" and not unbounded["dropped"]
    assert loads["open"]["layers"][1]["dropped"]


def test_the_promise_is_held_against_the_layers_own_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer 1 is decided at layer 0's larger γ."""
    model = make("olmoe")
    tokens_BS, mask_BS = batch(), MASK_BS
    assign = hook.decide
    loose = create_method("score", 1.5)

    def decide(scores: Scores, _method: Method, groups: TokenGroups, **more: Any) -> Assignment:
        return assign(scores, loose, groups, **more)

    with capacity_aware(model, "score", layer_gammas=(1.5, 0.5)) as meter, torch.no_grad():
        monkeypatch.setattr(hook, "decide", decide)
        with pytest.raises(EnforcementError, match=r"enforced: model\.layers\.1\.\S+: bound_holds"):
            model(tokens_BS, attention_mask=mask_BS)
    assert meter.report()["layers"][0]["violations"] == 0


def test_equal_factors_are_one() -> None:
    assert create_method("score", layer_gammas=[1, 1.0]) == create_method("score", 1.0)
    assert create_method("score", layer_gammas=(math.inf, math.inf)) == create_method("baseline")
    one = create_method("score", layer_gammas=[1, math.inf], ep_size=2)
    identity = one.identity()
    assert identity["layer_gammas"] == [1.0, "inf"] and "gamma" not in identity
    again = {key: value for key, value in identity.items() if key != "method"}
    assert create_method("score", **again) == one
    assert one.of_layer(1).ep_size == 2, "a layer without a capacity has the groups of the others"
    assert "layer_gammas" not in create_method("score", 1.0).identity()


def test_another_number_of_layers_is_refused() -> None:
    with (
        pytest.raises(UsageError, match="layer_gammas: 3 capacity factors for 2 MoE layers"),
        capacity_aware(make("olmoe"), "score", layer_gammas=(1, 1.5, 2)),
    ):
        pass
    with (
        pytest.raises(UsageError, match="a calibration chooses the γ of each layer"),
        capacity_aware(make("olmoe"), "score", "adaptive", budget=0.1),
    ):
        pass


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
    found = curve.curves()[0]
    for number, gamma in enumerate(gammas):
        wanted = curve_reference(asked, [of[number] for of in limits], 8 // sharing)
        ours = (found.dropped_X, found.dropped_scores_X, found.straggler_X)
        assert [part[number] for part in ours] == pytest.approx(wanted, abs=1e-6)
        with capacity_aware(model, method.at(gamma)) as bound, torch.no_grad():
            model(tokens_BS, attention_mask=mask_BS)
            model(tokens_BS[:2, :3], attention_mask=mask_BS[:2, :3])
        first = bound.report()["layers"][0]  # its tokens are those of the stock model
        assert first["drop_rate"] == pytest.approx(found.dropped_X[number], abs=1e-6)
    assert 0 < found.dropped_X[1] < found.dropped_X[0] and found.dropped_X[-1] == 0
    assert found.dropped_scores_X[1] < found.dropped_X[1], "the lowest scores are dropped"
