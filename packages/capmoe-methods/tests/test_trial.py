"""Adaptive against static γ: equal drops and equal straggler factors by interpolation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from capmoe_eval.paper.pairing import Paired
from hypothesis import given
from hypothesis import strategies as st

from capmoe_methods.trial import (
    by_model,
    least,
    mean_interval,
    nearness,
    primary,
    verdicts,
)

SHARES = st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=6, unique=True)


@given(SHARES, st.floats(-0.1, 1.1))
def test_it_interpolates_between_neighbours(shares: list[float], wanted: float) -> None:
    values = np.array(shares)
    others = 3 * values - 1
    weight_N = nearness(wanted, values)
    if not min(values) <= wanted <= max(values):
        assert weight_N is None
        return
    assert (weight_N >= 0).all()
    assert (weight_N > 0).sum() <= 2
    assert weight_N @ values == pytest.approx(wanted)
    order = np.argsort(values)
    expected = np.interp(wanted, values[order], others[order])
    assert weight_N @ others == pytest.approx(expected)


@given(SHARES, st.floats(0, 1))
def test_no_convex_curve_is_lower_than_the_least(shares: list[float], wanted: float) -> None:
    drops = np.array(shares)
    curve = (drops - 1) ** 2
    lowest = least(wanted, drops, curve)
    if lowest is not None:
        assert lowest <= (wanted - 1) ** 2 + 1e-9
        weight_N = nearness(wanted, drops)
        assert lowest <= weight_N @ curve + 1e-9
    elif len(drops) > 2:
        assert not min(drops) <= wanted <= max(drops)


@pytest.mark.parametrize(
    ("value", "drops", "stragglers", "expected"),
    [
        (0.3, [0.1, 0.2, 0.4, 0.8], [3.0, 2.0, 1.5, 1.3], 1.55),
        (0.3, [0.1, 0.2, 0.4], [3.0, 2.0, 1.5], 1.0),
        (0.2, [0.1, 0.2, 0.4], [3.0, 2.0, 1.5], 2.0),
        (0.3, [0.2, 0.4, 0.6], [2.0, 1.5, 0.0], 1.75),  # not convex: between its neighbours
        (0.3, [0.2, 0.4], [2.0, 1.5], None),  # no line beside it is known
        (0.5, [0.1, 0.2, 0.4], [3.0, 2.0, 1.5], None),
    ],
)
def test_the_least_is_on_the_lines_beside_a_gap(
    value: float, drops: list[float], stragglers: list[float], expected: float | None
) -> None:
    assert least(value, np.array(drops), np.array(stragglers)) == (
        expected if expected is None else pytest.approx(expected)
    )


def outcome(
    model: str,
    task: str,
    budget: float,
    gain: float | None,
    right: list[float] | None,
    kind: str = "pairs",
) -> dict[str, object]:
    scores = None
    if right is not None:
        scores = Paired((("a", "b"),), np.array(right), np.full(len(right), 0.5))
    return {
        **{"model": model, "task": task, "budget": budget, "budget_of": kind},
        "static": None if gain is None else 2.0 - gain,
        "gain": gain,
        "most": None if gain is None else gain + 0.5,
        "scores": scores,
        "points": None if scores is None else 100 * scores.differences.mean(),
    }


def test_a_verdict_counts_each_model_once() -> None:
    compared = pd.DataFrame(
        [
            outcome("olmoe", "obqa", 0.1, -0.2, [1, 1, 0, 1]),
            outcome("olmoe", "obqa", 0.2, -0.4, [1, 0, 0, 1]),
            outcome("olmoe", "piqa", 0.1, 0.1, [0, 0, 1, 0]),
            outcome("olmoe", "piqa", 0.2, None, None),
            outcome("mixtral", "obqa", 0.1, 0.2, [1, 1, 1, 1]),
            outcome("mixtral", "obqa", 0.1, 5.0, None, "scores"),
        ]
    )
    judged = verdicts(compared)
    low, high, both = (judged.iloc[number] for number in range(3))
    assert primary(judged) == pytest.approx(both.to_dict(), nan_ok=True)
    assert judged["cells"].tolist() == [3, 1, 3, 1, 1]
    assert judged["budget"].tolist() == pytest.approx([0.1, 0.2, np.nan, 0.1, np.nan], nan_ok=True)
    assert np.isnan(high["straggler"]), "one model has no interval"
    assert low["straggler"] == pytest.approx((-0.05 + 0.2) / 2)
    ends = both[["straggler", "straggler_low", "straggler_high"]].tolist()
    assert ends == pytest.approx(mean_interval([-0.1, 0.2])), "models are the units"
    assert both["most"] == pytest.approx(0.05 + 0.5)
    # Models count equally, and the tasks of each: 12.5 and −25 of one, 50 of the other.
    assert both["accuracy"] == pytest.approx(((12.5 - 25) / 2 + 50) / 2)
    assert by_model(compared[:4], "points").to_dict() == {"olmoe": pytest.approx((12.5 - 25) / 2)}


def test_the_interval_is_students() -> None:
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.4841, 4.4841), abs=1e-3)
    assert mean_interval([1.0]) is None
