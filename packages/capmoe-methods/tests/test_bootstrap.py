"""Shares and sums of resampled documents, beside resamples that are listed one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from capmoe_methods.bootstrap import resampled_sums, share_of


def naive_share(part: list[float], whole: list[float]) -> tuple[float, float, float]:
    """The share and its interval, from resamples that are listed one by one."""
    units = [resampled_sums(unit, 10_000, "t") for unit in np.eye(len(whole))]
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


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=64, max_size=90))
def test_sums_of_fractions_are_linear_in_the_units(values: list[float]) -> None:
    """Scores of generated texts are hardly ever alike: each has a sum of its own."""
    counts = [resampled_sums(unit, 50, "s7") for unit in np.eye(len(values))]
    assert resampled_sums(np.array(values), 50, "s7") == pytest.approx(np.array(values) @ counts)
