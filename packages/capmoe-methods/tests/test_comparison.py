"""Cells beside each other: resampled shares, interpolation, and adaptive against static γ."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from capmoe_eval.paper.pairing import Paired
from capmoe_eval.paper.statistics import mean_interval
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from capmoe_methods.comparison import nearness, resampled_sums, share_of
from capmoe_methods.trial import by_model, least, primary, verdicts


def naive_share(part: list[float], whole: list[float]) -> tuple[float, float, float]:
    """The share and its interval, from resamples that are listed one by one."""
    units = [resampled_sums(unit, "t") for unit in np.eye(len(whole))]
    low, high = [], []
    for counts in np.array(units).T:
        lost = float(counts @ whole)
        share = float(counts @ part) / lost if lost > 1e-9 else None
        low.append(-math.inf if share is None else share)
        high.append(math.inf if share is None else share)
    return sum(part) / sum(whole), sorted(low)[249], sorted(high)[9750]


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 1, -1]), st.sampled_from([0, 1, 1, -1])),
        min_size=3,
        max_size=12,
    )
)
@example([(1, 1), (0, -1), (0, 1), (0, 0)])  # often nothing is lost: no end is known
@example([(1, 4), (1, 4), (0, 0), (1, 4)])  # a quarter in every resample
@settings(max_examples=8, deadline=None)
def test_a_share_is_that_of_each_resample(pairs: list[tuple[int, int]]) -> None:
    part, whole = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    assume(sum(whole) > 0)
    share = share_of(np.array(part), np.array(whole), "t")
    assert share == pytest.approx(naive_share(part, whole))


SHARES = st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=6, unique=True)


@given(SHARES, st.floats(-0.1, 1.1))
def test_it_interpolates_between_neighbours(shares: list[float], wanted: float) -> None:
    values = np.array([*shares, np.nan])  # such as a rank's peak of the stock model
    weight_N = nearness(wanted, values)
    if not min(shares) <= wanted <= max(shares):
        assert weight_N is None
        return
    assert (weight_N >= 0).all()
    assert (weight_N > 0).sum() <= 2
    assert weight_N[:-1] @ shares == pytest.approx(wanted)
    assert weight_N[-1] == 0
    below, above = (max(n for n in shares if n <= wanted), min(n for n in shares if n >= wanted))
    assert set(values[weight_N > 0]) <= {below, above}


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
    ],
)
def test_the_least_is_on_the_lines_beside_a_gap(
    value: float, drops: list[float], stragglers: list[float], expected: float | None
) -> None:
    assert least(value, np.array(drops), np.array(stragglers)) == pytest.approx(expected)


def test_a_verdict_counts_each_model_once() -> None:
    rows = [
        ("olmoe", "obqa", 0.1, "pairs", -0.2, [1, 1, 0, 1]),
        ("olmoe", "obqa", 0.2, "pairs", -0.4, [1, 0, 0, 1]),
        ("olmoe", "piqa", 0.1, "pairs", 0.1, [0, 0, 1, 0]),
        ("olmoe", "piqa", 0.2, "pairs", None, None),
        ("mixtral", "obqa", 0.1, "pairs", 0.2, [1, 1, 1, 1]),
        ("mixtral", "obqa", 0.1, "scores", 5.0, None),
    ]
    compared = pd.DataFrame(rows, columns=["model", "task", "budget", "budget_of", "gain", "right"])
    compared = compared.assign(static=2.0 - compared["gain"], most=compared["gain"] + 0.5)
    compared["scores"] = [
        None if right is None else Paired((("a", "b"),), np.array(right), np.full(4, 0.5))
        for right in compared.pop("right")
    ]
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
    assert by_model(compared[:4], "gain").to_dict() == {"olmoe": pytest.approx((-0.3 + 0.1) / 2)}
