"""Adaptive against static γ: equal drops and equal straggler factors by interpolation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.paper.pairing import Paired
from capmoe_eval.routing.method import Adaptive
from capmoe_eval.serving.trial import Outcome, between, mean_interval, verdicts

SHARES = st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=6, unique=True)


@given(SHARES, st.floats(-0.1, 1.1))
def test_it_interpolates_between_neighbours(values: list[float], wanted: float) -> None:
    others = [3 * value - 1 for value in values]
    found = between(wanted, values)
    if not min(values) <= wanted <= max(values):
        assert found is None
        return
    assert found is not None and 0 <= found.weight <= 1
    assert found.mix(values) == pytest.approx(wanted)
    order = np.argsort(values)
    known = np.interp(wanted, np.array(values)[order], np.array(others)[order])
    assert found.mix(others) == pytest.approx(known)


def outcome(task: str, budget: float, gain: float | None, scores: list[float] | None) -> Outcome:
    paired = None
    if scores is not None:
        paired = Paired((("a", "b"),), np.array(scores), np.full(len(scores), 0.5))
    static = None if gain is None else 2.0 - gain
    return Outcome("olmoe", task, Adaptive(budget, "pairs"), 0.1, 2.0, static, paired)


def test_a_verdict_counts_each_model_and_task_once() -> None:
    found = [
        outcome("obqa", 0.1, -0.2, [1, 1, 0, 1]),
        outcome("obqa", 0.2, -0.4, [1, 0, 0, 1]),
        outcome("piqa", 0.1, 0.1, [0, 0, 1, 0]),
        outcome("piqa", 0.2, None, None),
    ]
    low, high, both = verdicts(found)
    assert (low.budget, high.budget, both.budget) == (0.1, 0.2, None)
    assert (low.cells, high.cells, both.cells) == (2, 1, 2)
    assert high.straggler is None, "one cell has no interval"
    assert low.straggler is not None and low.straggler[0] == pytest.approx(-0.05)
    assert both.straggler is not None and both.straggler[0] == pytest.approx((-0.3 + 0.1) / 2)
    assert low.accuracy is not None and low.accuracy.effect == pytest.approx((25 - 25) / 2)
    assert both.accuracy is not None and both.accuracy.effect == pytest.approx((12.5 - 25) / 2)


def test_the_interval_is_students() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    assert found == pytest.approx((2.0, 2.0 - 2.4841, 2.0 + 2.4841), abs=1e-3)
    assert mean_interval([1.0]) is None
