"""A server's settings: what its environment says, and one line for what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.satellites import NEEDS_METHODS

from capmoe_serve.server.settings import TRACE_TOKENS, read_settings


def read(**settings: str) -> tuple[Method, Path | None, int] | None:
    """Return the settings of an environment with variables by their names without the prefix."""
    variables = {f"CAPMOE_{name.upper()}": value for name, value in settings.items()}
    return read_settings({"PATH": "/bin", **variables})


def test_the_variables_are_the_knobs_of_a_method() -> None:
    settings = read(
        method="expanded_drop", gamma="1.5", candidates="ranked", m="2", protect_topk="true"
    )
    knobs = {"candidates": "ranked", "m": 2, "protect_topk": True}
    assert settings == (create_method("expanded_drop", 1.5, **knobs), None, TRACE_TOKENS)
    by_layer = read(method="score", gamma="[1.0, 0.5]", trace="there", trace_tokens="7")
    assert by_layer == (create_method("score", [1.0, 0.5]), Path("there"), 7)
    for gamma in ("inf", ".inf", "1000"):
        assert read(method="score", gamma=gamma) is not None
    assert read(method="baseline") == (create_method("baseline"), None, TRACE_TOKENS)
    assert read(method="score", gamma="inf") == (
        create_method("score", math.inf),
        None,
        TRACE_TOKENS,
    )


def test_without_a_method_there_is_none() -> None:
    assert read() is None
    assert read(data_root="/data", results_dir="/results", debug="1") is None


SCORE = "METHOD=score GAMMA=1"
REFUSED = {
    "METHOD=score GAMMA=-1": "^CAPMOE_GAMMA=-1: .*at least 0",
    "METHOD=score GAMMA=nan": "^CAPMOE_GAMMA=nan: ",
    "METHOD=score": "^CAPMOE_GAMMA: .*for example CAPMOE_GAMMA=1.0",
    "METHOD=scor GAMMA=1": r"^CAPMOE_METHOD=scor: did you mean 'score'\?",
    "METHOD= GAMMA=1": "^CAPMOE_METHOD=: choose one of baseline, order",
    "METHOD=score GAMA=1": r"^CAPMOE_GAMA=1: did you mean 'CAPMOE_GAMMA'\?",
    "METHD=score": r"^CAPMOE_METHD=score: did you mean 'CAPMOE_METHOD'\?",
    "GAMMA=1": "^CAPMOE_GAMMA=1: has no effect without CAPMOE_METHOD",
    "TRACE=there": "^CAPMOE_TRACE=there: has no effect without CAPMOE_METHOD",
    f"{SCORE} EP_SIZE=8": "^CAPMOE_EP_SIZE=8: an engine has the tokens of one rank.*leave ep_size",
    f"{SCORE} SCOPE=sequence": "^CAPMOE_SCOPE=sequence: ",
    f"{SCORE} COUNT_PADDING=true": "^CAPMOE_COUNT_PADDING=true: ",
    f"{SCORE} MODALITY=text_first": "^CAPMOE_MODALITY=text_first: a step does not tell",
    f"{SCORE} DECODE=yes": "^CAPMOE_DECODE=.*choose one of",
    "METHOD=device_drop GAMMA=1.5": "^CAPMOE_METHOD=device_drop: drops nothing in an engine",
    f"{SCORE} TRACE_TOKENS=0": "^CAPMOE_TRACE_TOKENS=0: must be a whole number of at least 1",
}
CALIBRATED = {
    "METHOD=sere": "^CAPMOE_METHOD=sere: needs a calibration.*such as CAPMOE_METHOD=score",
    "METHOD=macs GAMMA=1": "^CAPMOE_METHOD=macs: needs a calibration",
}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        *REFUSED.items(),
        *(pytest.param(*row, marks=NEEDS_METHODS) for row in CALIBRATED.items()),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(words: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as caught:
        read(**dict(word.split("=") for word in words.split()))
    assert "\n" not in str(caught.value)
