"""Cells beside each other: resampled shares, interpolation, and adaptive against static γ."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from capmoe_methods.comparison import nearness, resampled_sums, share_of
from capmoe_methods.trial import least


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
