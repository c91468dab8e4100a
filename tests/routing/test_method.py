"""Identities, labels and refusals of the paper's methods."""

from __future__ import annotations

import math
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.methods.token_drop import DeviceDrop, TokenDrop
from capmoe_eval.routing.registry import create_method


def test_knobs_without_effect_are_no_part_of_the_identity() -> None:
    assert create_method("baseline", 1.0, ep_size=4, seed=3) == create_method("baseline")
    assert create_method("score", 1, seed=3, m=9, rounds=2) == create_method("score", 1.0)
    assert create_method("expert_drop", 2.0, rounding="floor") == create_method("expert_drop")
    assert create_method("random", 1.0, seed=3) != create_method("random", 1.0)
    by_sequence = create_method("score", 1.0, scope="sequence")
    assert create_method("score", 1.0, scope="sequence", ep_size=4) == by_sequence
    assert create_method("expanded_drop", 1.0, m=9) == create_method("expanded_drop", 1.0)
    ranked = create_method("expanded_drop", 1.0, candidates="ranked", m=9)
    assert ranked.identity()["m"] == 9
    # As before there was the knob.
    assert "modality" not in create_method("score", 1.0).identity()
    text_first = create_method("score", 1.0, modality="text_first")
    assert text_first.identity()["modality"] == "text_first"


def test_device_drop_is_score_at_device_level() -> None:
    by_device = create_method("score", gamma=1.0, granularity="device")
    assert create_method("device_drop", gamma=1.0) == by_device
    assert DeviceDrop(gamma=1.0).unit == "device"


def test_a_method_and_a_name_are_two_ways_to_the_same() -> None:
    assert TokenDrop(gamma=1, ep_size=8) == create_method("score", "1.0", ep_size=8)
    by_layer = TokenDrop(gamma=[1, 2.0])
    assert by_layer == create_method("score", layer_gammas=[1.0, 2.0])
    assert by_layer.factor.uniform is None and by_layer.of_layer(1) == TokenDrop(gamma=2.0)
    assert TokenDrop(gamma=[1.5, 1.5]) == TokenDrop(gamma=1.5)
    assert TokenDrop(gamma=1.0).at(2) == TokenDrop(gamma=2.0)


def test_any_setting_can_be_asked_for() -> None:
    """The default of what a method does not have."""
    method = create_method("random", 1.0, seed=4)
    assert [method.setting(knob) for knob in ("seed", "rounds", "layer_gammas")] == [4, 3, None]


@pytest.mark.parametrize(
    ("name", "gamma", "knobs", "label"),
    [
        ("expanded_drop", 1.0, {"ep_size": 8}, "expanded_drop-g1-ep8"),
        ("expanded_drop", 1.0, {}, "expanded_drop-g1-global"),
        (
            "expanded_drop",
            1.0,
            {"ep_size": 8, "candidates": "global"},
            "expanded_drop-g1-ep8-global",
        ),
        (
            "expanded_drop",
            1.0,
            {"ep_size": 8, "candidates": "ranked"},
            "expanded_drop-g1-ep8-ranked-m4",
        ),
        ("token_reroute", 1.0, {"rounds": 1, "ep_size": 8}, "score-g1-ep8"),
        ("random", 0.0, {"ep_size": 8, "seed": 2}, "score-g0-ep8"),
        ("random", 1.0, {"seed": 2}, "random-g1-s2"),
        ("score", math.inf, {"ep_size": 8}, "baseline"),
        ("score", None, {"layer_gammas": [1.0, 2.0]}, "score-by_layer"),
        ("score", 0.5, {"ep_size": 8, "modality": "image_first"}, "score-g0.5-ep8-image_first"),
        ("score", 1.0, {"count_padding": True}, "score-g1-count_padding"),
    ],
)
def test_a_label_names_what_differs_from_the_defaults(
    name: str, gamma: float | None, knobs: dict[str, Any], label: str
) -> None:
    """Files of results are named by it: a default that goes without saying must stay one."""
    assert create_method(name, gamma, **knobs).label == label


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"name": "scroe", "gamma": 1.0}, "method=scroe: did you mean 'score'? choose one of base"),
        ({"name": "score"}, "gamma: method 'score' needs a capacity factor"),
        ({"name": "score", "gamma": -1}, "gamma=-1: the capacity factor must be a number of at le"),
        ({"name": "score", "gamma": "abc"}, "gamma=abc: the capacity factor must be"),
        ({"name": "score", "gamma": math.nan}, "gamma=nan: the capacity factor must be"),
        ({"name": "score", "gamma": True}, "gamma=true: the capacity factor must be"),
        ({"name": "score", "gamma": 1, "ep_size": 0}, "ep_size=0: must be a whole number of at le"),
        ({"name": "score", "gamma": 1, "ep_size": 1.5}, "ep_size=1.5: must be a whole number"),
        ({"name": "score", "gamma": 1, "scope": "bach"}, "scope=bach: did you mean 'batch'?"),
        ({"name": "score", "gamma": 1, "max_k": "yes"}, "max_k=yes: must be true or false"),
        ({"name": "score", "gamma": 1, "modality": "image"}, "modality=image: did you mean 'image"),
        ({"name": "score", "gamma": 1, "eq_size": 8}, "knob=eq_size: did you mean 'ep_size'?"),
        ({"name": "score", "layer_gammas": []}, "layer_gammas=[]: must be a capacity factor for"),
        ({"name": "baseline", "layer_gammas": [1.0]}, "layer_gammas=[1.0]: method 'baseline' has"),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        create_method(**knobs)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_class_refuses_as_its_name_does() -> None:
    with pytest.raises(UsageError, match=r"^ep_size=0: must be a whole number of at least 1"):
        TokenDrop(gamma=1.0, ep_size=0)
    with pytest.raises(UsageError, match=r"^gamma: method 'score' needs a capacity factor"):
        TokenDrop()


def test_a_method_cannot_be_changed() -> None:
    method: Method = TokenDrop(gamma=1.0)
    with pytest.raises(AttributeError):
        method.ep_size = 2
