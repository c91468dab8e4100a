"""Adaptive against static γ: equal drops and equal straggler factors by interpolation."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from capmoe_eval.paper.pairing import Paired
from hypothesis import given
from hypothesis import strategies as st
from tests.pages import signed

from capmoe_methods.adaptive_gamma import AdaptiveFactor
from capmoe_methods.trial import (
    AdaptiveOutcome,
    between,
    by_model,
    least,
    mean_interval,
    points,
    primary,
    verdicts,
)

SHARES = st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=6, unique=True)


@given(SHARES, st.floats(-0.1, 1.1))
def test_it_interpolates_between_neighbours(values: list[float], wanted: float) -> None:
    others = [3 * value - 1 for value in values]
    found = between(wanted, values)
    if not min(values) <= wanted <= max(values):
        assert found is None
        return
    assert found is not None
    assert 0 <= found.weight <= 1
    assert found.mix(values) == pytest.approx(wanted)
    order = np.argsort(values)
    known = np.interp(wanted, np.array(values)[order], np.array(others)[order])
    assert found.mix(others) == pytest.approx(known)


@given(SHARES, st.floats(0, 1))
def test_no_convex_curve_is_lower_than_the_least(drops: list[float], wanted: float) -> None:
    def curve(x: float) -> float:
        return (x - 1) ** 2

    found = least(wanted, drops, [curve(x) for x in drops])
    if found is not None:
        assert found <= curve(wanted) + 1e-9
        at = between(wanted, drops)
        assert at is not None
        assert found <= at.mix([curve(x) for x in drops]) + 1e-9
    elif len(drops) > 2:
        assert not min(drops) <= wanted <= max(drops)


def test_the_least_is_on_the_lines_beside_a_gap() -> None:
    assert least(0.3, [0.1, 0.2, 0.4, 0.8], [3.0, 2.0, 1.5, 1.3]) == pytest.approx(1.55)
    assert least(0.3, [0.1, 0.2, 0.4], [3.0, 2.0, 1.5]) == pytest.approx(1.0)
    assert least(0.2, [0.1, 0.2, 0.4], [3.0, 2.0, 1.5]) == 2.0
    assert least(0.3, [0.2, 0.4, 0.6], [2.0, 1.5, 0.0]) == 1.75, (
        "not convex: between its neighbours"
    )
    assert least(0.3, [0.2, 0.4], [2.0, 1.5]) is None, "no line beside it is known"
    assert least(0.5, [0.1, 0.2, 0.4], [3.0, 2.0, 1.5]) is None


def outcome(
    model: str,
    task: str,
    budget: float,
    gain: float | None,
    scores: list[float] | None,
    kind: Literal["pairs", "scores"] = "pairs",
) -> AdaptiveOutcome:
    paired = None
    if scores is not None:
        paired = Paired((("a", "b"),), np.array(scores), np.full(len(scores), 0.5))
    static = None if gain is None else 2.0 - gain
    return AdaptiveOutcome(
        model=model,
        task=task,
        factor=AdaptiveFactor(budget, kind),
        budget=budget,
        budget_of=kind,
        drop_rate=0.1,
        straggler=2.0,
        static_straggler=static,
        static_least=None if static is None else static - 0.5,
        apart=0.1,
        scores=paired,
    )


def test_a_verdict_counts_each_model_once() -> None:
    compared = [
        outcome("olmoe", "obqa", 0.1, -0.2, [1, 1, 0, 1]),
        outcome("olmoe", "obqa", 0.2, -0.4, [1, 0, 0, 1]),
        outcome("olmoe", "piqa", 0.1, 0.1, [0, 0, 1, 0]),
        outcome("olmoe", "piqa", 0.2, None, None),
        outcome("mixtral", "obqa", 0.1, 0.2, [1, 1, 1, 1]),
        outcome("mixtral", "obqa", 0.1, 5.0, None, "scores"),
    ]
    low, high, both, *_ = judged = verdicts(compared)
    assert primary(judged) is both
    assert [(v.budget, v.cells) for v in (low, high, both)] == [(0.1, 3), (0.2, 1), (None, 3)]
    assert high.straggler is None, "one model has no interval"
    assert low.straggler is not None
    assert low.straggler.mean == pytest.approx((-0.05 + 0.2) / 2)
    assert both.straggler == pytest.approx(mean_interval([-0.1, 0.2])), "models are the units"
    assert both.straggler_most == pytest.approx(0.05 + 0.5)
    # Models count equally, and the tasks of each: 12.5 and −25 of one, 50 of the other.
    assert both.accuracy is not None
    assert both.accuracy.mean == pytest.approx(((12.5 - 25) / 2 + 50) / 2)
    assert by_model(compared[:4], points) == {"olmoe": pytest.approx((12.5 - 25) / 2)}


@pytest.mark.parametrize(
    ("gains", "words"),
    [((-0.3, -0.31), "a gain is shown"), ((-0.3, 0.1), "no gain"), ((0.3, 0.31), "a loss")],
)
def test_the_words_follow_the_interval(gains: tuple[float, float], words: str) -> None:
    pairs = zip("ab", gains, strict=True)
    last = primary(verdicts([outcome(name, "obqa", 0.1, gain, None) for name, gain in pairs]))
    interval = mean_interval(gains)
    assert interval is not None
    assert words in str(last)
    assert signed(*interval, 3) in str(last)


def test_the_interval_is_students() -> None:
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.4841, 4.4841), abs=1e-3)
    assert mean_interval([1.0]) is None
