"""A capacity factor for each layer: bounds, proofs and records follow the layer's own."""

from __future__ import annotations

import math

import pytest
import torch

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.session import capacity_aware
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
