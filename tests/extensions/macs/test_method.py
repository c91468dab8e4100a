"""MACS: its identity and label, its drawing, and its refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.macs import MACS
from capmoe_eval.routing.registry import create_method
from tests.routing.drawing import drawing
from tests.routing.test_canonical import are_alike, are_different


def test_golden() -> None:
    path = Path(__file__).with_name("golden.txt")
    methods = [MACS(gamma=1.0), MACS(gamma=1.0, ep_size=2), MACS(gamma=1.0, reroute="none")]
    assert drawing(methods) == path.read_text(encoding="utf-8")


def test_settings_that_decide_alike_are_one_method() -> None:
    are_alike(("macs", math.inf, {"delta": 2.0, "ep_size": 8}), ("baseline", None, {}))
    are_alike(("macs", 0.0, {"rho": 2.0}), ("score", 0.0, {}))
    rho = {"rho": 0.0}
    are_alike(("macs", 1.0, rho | {"modality_threshold": 0.9}), ("macs", 1.0, rho))
    are_alike(("macs", 1.0, {"modality": "image_first"}), ("macs", 1.0, {"granularity": "device"}))
    # Tokens of images weigh a half.
    light = {"delta": 0.0, "rho": 0.0, "reroute": "none"}
    are_different(("macs", 1.0, light), ("score", 1.0, {}))
    # Rerouting is to experts of the same rank, whatever the group.
    two, four = ({"ep_size": ranks, "scope": "sequence"} for ranks in (2, 4))
    are_different(("macs", 1.0, two), ("macs", 1.0, four))


def test_its_label_has_what_differs_from_the_defaults() -> None:
    knobs = {"reroute": "none", "rho": 0.5, "delta": 2.0}
    assert create_method("macs", 1.0, ep_size=8).label == "macs-g1-ep8"
    assert create_method("macs", 0.5, **knobs).label == "macs-g0.5-delta2.0-rho0.5-none"


def test_it_is_calibrated_where_capacities_depend_on_modalities() -> None:
    assert MACS(gamma=1.0).calibration == "expert_modalities"
    assert MACS(gamma=1.0, rho=0.0).calibration is None


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({}, "gamma: method 'macs' needs a capacity factor"),
        ({"gamma": 1, "delta": -1}, "delta=-1: must be a number of at least 0"),
        ({"gamma": 1, "delta": math.inf}, "delta=inf: must be a finite number of at least 0"),
        ({"gamma": 1, "rho": 2.5}, "rho=2.5: must be a number from 0 to 2"),
        ({"gamma": 1, "modality_threshold": 0.5}, "modality_threshold=0.5: must be a number above"),
        ({"gamma": 1, "reroute": "lokal"}, "reroute=lokal: did you mean 'local'"),
        (
            {"gamma": "adaptive", "budget": 0.1},
            "gamma=adaptive: chooses by numbers of tokens, and macs bounds their weights",
        ),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        create_method("macs", **knobs)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
