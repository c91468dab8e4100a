"""Expectations of an effect, as intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.paper.contrasts import Expectation, read_contrasts
from capmoe_eval.paper.margins import in_points
from capmoe_eval.paper.verdicts import Outcome


def test_expectations_are_intervals() -> None:
    assert Expectation.of("greater") == Expectation(0.0, math.inf)
    assert str(Expectation.of({"at_least": -1})) == "≥ -1"
    assert Expectation.of({"within": 1}).judge(-0.5, 1.5) is Outcome.UNDECIDED
    assert Expectation.of({"within": 1}).judge(1.5, 2.5) is Outcome.FAILS
    assert Expectation.of("greater").judge(0.0, 2.0) is Outcome.UNDECIDED
    assert Expectation.of({"at_least": "-gain"}).low == -in_points("gain")
    with pytest.raises(ValueError, match="expect"):
        Expectation.of({"within": 1, "at_least": 2})


@given(
    st.sampled_from(["greater", "less"]) | st.floats(0.1, 5),
    st.floats(-9, 9),
    st.floats(0, 9),
)
def test_an_expectation_and_its_mirror_image_agree(
    raw: str | float, low: float, width: float
) -> None:
    mirrored = {"greater": "less", "less": "greater"}
    expect = Expectation.of({"at_least": -raw} if isinstance(raw, float) else raw)
    mirror = Expectation.of({"at_most": raw} if isinstance(raw, float) else mirrored[raw])
    high = low + width
    assert expect.judge(low, high) is mirror.judge(-high, -low)
    # A wider interval never decides what a narrower one left open.
    if expect.judge(low, high) is Outcome.UNDECIDED:
        assert expect.judge(low - 1, high + 1) is Outcome.UNDECIDED


def test_lists_of_contrasts_are_named_once_and_read_everywhere() -> None:
    named, own = (
        read_contrasts(["token_over_expert"]),
        {"a": {"method": "score", "gamma": "own"}, "b": {"method": "expert_drop"}},
    )
    assert named == read_contrasts([own | {"expect": "greater"}])
    with pytest.raises(ValueError, match="'nothing' are none of score_over_all, "):
        read_contrasts(["nothing"])
    with pytest.raises(ValueError, match="margin 'generous' is none of comparable, "):
        Expectation.of({"at_least": "-generous"})
