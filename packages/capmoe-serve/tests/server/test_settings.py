"""A server's settings: what its environment says, and one line for what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from tests.satellites import NEEDS_METHODS

from capmoe_serve.server.settings import ServerSettings, read_settings


def read(**settings: str) -> ServerSettings | None:
    """Return the settings of an environment with variables by their names without the prefix."""
    variables = {f"CAPMOE_{name.upper()}": value for name, value in settings.items()}
    return read_settings({"PATH": "/bin", **variables})


def test_the_variables_are_the_knobs_of_a_method() -> None:
    settings = read(
        method="expanded_drop", gamma="1.5", candidates="ranked", m="2", protect_topk="true"
    )
    knobs = {"candidates": "ranked", "m": 2, "protect_topk": True}
    assert settings == ServerSettings(create_method("expanded_drop", 1.5, **knobs))
    by_layer = read(method="score", gamma="[1.0, 0.5]", trace="there", trace_tokens="7")
    assert by_layer == ServerSettings(create_method("score", [1.0, 0.5]), Path("there"), 7)
    for gamma in ("inf", ".inf", "1000"):
        assert read(method="score", gamma=gamma) is not None
    assert read(method="baseline") == ServerSettings(create_method("baseline"))
    assert read(method="score", gamma="inf") == ServerSettings(create_method("score", math.inf))


def test_without_a_method_there_is_none() -> None:
    assert read() is None
    assert read(data_root="/data", results_dir="/results", debug="1") is None


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"method": "score", "gamma": "-1"}, ["CAPMOE_GAMMA=-1: ", "at least 0"]),
        ({"method": "score", "gamma": "nan"}, ["CAPMOE_GAMMA=nan: "]),
        ({"method": "score"}, ["CAPMOE_GAMMA: ", "for example CAPMOE_GAMMA=1.0"]),
        ({"method": "scor", "gamma": "1"}, ["CAPMOE_METHOD=scor: did you mean 'score'?"]),
        ({"method": "", "gamma": "1"}, ["CAPMOE_METHOD=: choose one of baseline, order"]),
        ({"method": "score", "gama": "1"}, ["CAPMOE_GAMA=1: did you mean 'CAPMOE_GAMMA'?"]),
        ({"methd": "score"}, ["CAPMOE_METHD=score: did you mean 'CAPMOE_METHOD'?"]),
        ({"gamma": "1"}, ["CAPMOE_GAMMA=1: has no effect without CAPMOE_METHOD"]),
        ({"trace": "there"}, ["CAPMOE_TRACE=there: has no effect without CAPMOE_METHOD"]),
        (
            {"method": "score", "gamma": "1", "ep_size": "8"},
            ["CAPMOE_EP_SIZE=8: an engine has the tokens of one rank", "leave ep_size out"],
        ),
        ({"method": "score", "gamma": "1", "scope": "sequence"}, ["CAPMOE_SCOPE=sequence: "]),
        (
            {"method": "score", "gamma": "1", "count_padding": "true"},
            ["CAPMOE_COUNT_PADDING=true: "],
        ),
        (
            {"method": "score", "gamma": "1", "modality": "text_first"},
            ["CAPMOE_MODALITY=text_first: a step does not tell"],
        ),
        ({"method": "score", "gamma": "1", "decode": "yes"}, ["CAPMOE_DECODE=", "choose one of"]),
        pytest.param(
            {"method": "sere"},
            ["CAPMOE_METHOD=sere: needs a calibration", "such as CAPMOE_METHOD=score"],
            marks=NEEDS_METHODS,
        ),
        pytest.param(
            {"method": "macs", "gamma": "1"},
            ["CAPMOE_METHOD=macs: needs a calibration"],
            marks=NEEDS_METHODS,
        ),
        (
            {"method": "device_drop", "gamma": "1.5"},
            ["CAPMOE_METHOD=device_drop: drops nothing in an engine"],
        ),
        (
            {"method": "score", "gamma": "1", "trace_tokens": "0"},
            ["CAPMOE_TRACE_TOKENS=0: must be a whole number of at least 1"],
        ),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(**settings)
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line
