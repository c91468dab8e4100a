from __future__ import annotations

import math

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import method_label
from capmoe_eval.routing.method import METHODS, Method


def test_knobs_without_effect_are_no_part_of_the_identity() -> None:
    assert Method("baseline", gamma=1.0, ep_size=4, seed=3) == Method("baseline")
    assert Method("score", gamma=1, seed=3, m=9, rounds=2) == Method("score", gamma=1.0)
    assert Method("expert_drop", gamma=2.0, rounding="floor") == Method("expert_drop")
    assert Method("random", gamma=1.0, seed=3) != Method("random", gamma=1.0)
    assert Method("score", 1.0, scope="sequence", ep_size=4) == Method(
        "score", 1.0, scope="sequence"
    )
    assert Method("expanded_drop", 1.0, m=9) == Method("expanded_drop", 1.0)
    assert Method("expanded_drop", 1.0, candidates="ranked", m=9).m == 9
    assert "modality" not in Method("score", 1.0).identity()  # as before there was the knob
    assert Method("score", 1.0, modality="text_first").identity()["modality"] == "text_first"


def test_device_drop_is_score_at_device_level() -> None:
    assert Method("device_drop", gamma=1.0) == Method("score", gamma=1.0, granularity="device")


def test_identity_rebuilds_the_method() -> None:
    for name in METHODS:
        for gamma in (0.0, 1.5, math.inf):
            for modality in ("uniform", "image_first"):
                named = {"candidates": "ranked", "m": 3, "seed": 5, "modality": modality}
                method = Method(name, gamma=gamma, ep_size=2, **named)
                knobs = method.identity()
                gamma_knob = knobs.pop("gamma", None)
                rebuilt = Method(
                    knobs.pop("method"),
                    gamma=None if gamma_knob is None else float(gamma_knob),
                    **knobs,
                )
                assert rebuilt == method


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (Method("expanded_drop", 1.0, ep_size=8), "expanded_drop-g1-ep8"),
        (Method("expanded_drop", 1.0), "expanded_drop-g1-global"),
        (
            Method("expanded_drop", 1.0, ep_size=8, candidates="global"),
            "expanded_drop-g1-ep8-global",
        ),
        (
            Method("expanded_drop", 1.0, ep_size=8, candidates="ranked"),
            "expanded_drop-g1-ep8-ranked-m4",
        ),
        (Method("token_reroute", 1.0, rounds=1, ep_size=8), "score-g1-ep8"),
        (Method("random", 0.0, ep_size=8, seed=2), "score-g0-ep8"),
        (Method("score", math.inf, ep_size=8), "baseline"),
        (Method("score", 0.5, ep_size=8, modality="image_first"), "score-g0.5-ep8-image_first"),
        (Method("oea", 1.0, ep_size=8, decode="only"), "oea-only-k1"),
        (Method("xshare", ep_size=8), "xshare-k1-b0.5"),
        (Method("sere", min_similarity=0.5, decode="only"), "sere-only-k1-sim0.5"),
        (
            Method("xshare", ep_size=8, granularity="device", k0=0, expert_budget=0.25),
            "xshare-ep8-device-k0-b0.25",
        ),
        (Method("macs", 1.0, ep_size=8), "macs-g1-ep8"),
        (Method("device_drop", 1.0, ep_size=8, placement="eplb"), "score-g1-ep8-device-eplb"),
        (Method("macs", 0.5, reroute="none", rho=0.5, delta=2), "macs-g0.5-delta2.0-rho0.5-none"),
    ],
)
def test_a_label_names_what_differs_from_the_defaults(method: Method, label: str) -> None:
    """Files of results are named by it: a default that goes without saying must stay one."""
    assert method_label(method) == label


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"name": "scroe", "gamma": 1.0}, "method=scroe: did you mean 'score'? choose one of base"),
        ({"name": "score"}, "gamma: method 'score' needs a capacity factor"),
        ({"name": "score", "gamma": -1}, "gamma=-1: the capacity factor must be a number of at le"),
        ({"name": "score", "gamma": "abc"}, "gamma=abc: the capacity factor must be"),
        ({"name": "score", "gamma": math.nan}, "gamma=nan: the capacity factor must be"),
        ({"name": "score", "gamma": True}, "gamma=true: the capacity factor must be"),
        ({"name": "score", "gamma": 1, "ep_size": 0}, "ep_size=0: must be a whole number from"),
        ({"name": "score", "gamma": 1, "ep_size": 1.5}, "ep_size=1.5: must be a whole number"),
        ({"name": "score", "gamma": 1, "scope": "bach"}, "scope=bach: did you mean 'batch'?"),
        ({"name": "score", "gamma": 1, "max_k": "yes"}, "max_k=yes: must be true or false"),
        ({"name": "oea", "k0": 0}, "k0=0: with OEA every token keeps its best expert"),
        ({"name": "sere", "k0": 0}, "k0=0: with SERE every token keeps its best expert"),
        (
            {"name": "sere", "min_similarity": -0.1},
            "min_similarity=-0.1: must be a number",
        ),
        ({"name": "sere", "min_similarity": True}, "min_similarity=true: must be a number"),
        ({"name": "xshare", "k0": -1}, "k0=-1: must be a whole number from 0 to"),
        ({"name": "xshare", "expert_budget": 8}, "expert_budget=8: must be a share of the experts"),
        ({"name": "xshare", "expert_budget": 0}, "expert_budget=0: must be a share"),
        ({"name": "macs"}, "gamma: method 'macs' needs a capacity factor"),
        ({"name": "macs", "gamma": 1, "delta": -1}, "delta=-1: must be a number of at least 0"),
        ({"name": "macs", "gamma": 1, "rho": 2.5}, "rho=2.5: must be a number from 0 to 2"),
        (
            {"name": "macs", "gamma": 1, "modality_threshold": 0.5},
            "modality_threshold=0.5: must be a share above 0.5",
        ),
        ({"name": "macs", "gamma": 1, "reroute": "lokal"}, "reroute=lokal: did you mean 'local'"),
        (
            {"name": "macs", "gamma": "adaptive", "budget": 0.1},
            "gamma=adaptive: chooses by numbers of tokens, and macs bounds their weights",
        ),
        ({"name": "score", "gamma": 1, "modality": "image"}, "modality=image: did you mean 'image"),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as error:
        Method(**knobs)  # type: ignore[arg-type]
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
