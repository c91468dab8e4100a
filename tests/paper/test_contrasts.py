"""Expectations of an effect, as intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.paper.contrasts import Expectation
from capmoe_eval.paper.verdicts import Outcome


def test_expectations_are_intervals() -> None:
    assert Expectation.of("greater") == Expectation(0.0, math.inf)
    assert str(Expectation.of({"at_least": -1})) == "≥ -1"
    assert Expectation.of({"within": 1}).judge(-0.5, 1.5, 0.9) is Outcome.UNDECIDED
    assert Expectation.of({"within": 1}).judge(1.5, 2.5, 0.9) is Outcome.FAILS
    assert Expectation.of("greater").judge(0.1, 2.0, 0.06) is Outcome.UNDECIDED
    with pytest.raises(ValueError, match="expect"):
        Expectation.of({"within": 1, "at_least": 2})


@given(
    st.sampled_from(["greater", "less"]) | st.floats(0.1, 5),
    st.floats(-9, 9),
    st.floats(0, 9),
    st.floats(0, 1),
)
def test_an_expectation_and_its_mirror_image_agree(
    raw: str | float, low: float, width: float, p: float
) -> None:
    mirrored = {"greater": "less", "less": "greater"}
    expect = Expectation.of({"at_least": -raw} if isinstance(raw, float) else raw)
    mirror = Expectation.of({"at_most": raw} if isinstance(raw, float) else mirrored[raw])
    high = low + width
    assert expect.judge(low, high, p) is mirror.judge(-high, -low, p)
    # A wider interval never decides what a narrower one left open.
    if expect.judge(low, high, p) is Outcome.UNDECIDED:
        assert expect.judge(low - 1, high + 1, p) is Outcome.UNDECIDED
