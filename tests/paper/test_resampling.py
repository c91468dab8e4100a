"""Bootstrap samples, beside samples that are listed one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.paper import resampling
from capmoe_eval.paper.resampling import resampled_sums


def test_sums_are_those_of_the_units_drawn() -> None:
    """Two units in samples of two: the sums are 0, 1 or 2, as two throws of a coin."""
    sums = resampled_sums(np.array([0.0, 1.0]), 4000, "s1")
    shares = [float(np.mean(sums == value)) for value in (0.0, 1.0, 2.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert sum(shares) == 1.0


# A byte holds 255, and 64 units are the first that are not multiplied.
@pytest.mark.parametrize("units", [7, 63, 64, 255, 256, 300])
def test_each_sample_has_as_many_units_as_there_are(units: int) -> None:
    assert (resampled_sums(np.ones(units), 50, "s2") == units).all()


def test_samples_differ() -> None:
    assert len(set(resampled_sums(np.arange(7.0), 50, "s2"))) > 10


def test_equal_seeds_draw_the_same_and_others_do_not() -> None:
    values = np.arange(30.0)
    first = resampled_sums(values, 100, "s3", "t0")
    assert (first == resampled_sums(values, 100, "s3", "t0")).all()
    assert (first != resampled_sums(values, 100, "s3", "t1")).any()
    # Common draws: a contrast of shifted scores is shifted in every sample.
    assert resampled_sums(values + 1, 100, "s3", "t0") == pytest.approx(first + 30)


def test_few_units_and_many_are_summed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([0.0, 0.5, -0.25, 0.5, 3.0])
    few = resampled_sums(values, 100, "s6")
    resampling._counts.cache_clear()
    monkeypatch.setattr(resampling, "_FEW", 0)
    assert resampled_sums(values, 100, "s6") == pytest.approx(few, abs=1e-12)
    assert few.std() > 0.1
    resampling._counts.cache_clear()


def test_parts_do_not_change_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(30.0)
    whole = resampled_sums(values, 100, "s4")
    resampling._counts.cache_clear()
    monkeypatch.setattr(resampling, "_PART", 70)  # two samples at a time
    assert (resampled_sums(values, 100, "s4") == whole).all()
    resampling._counts.cache_clear()


def test_no_samples_are_no_sums() -> None:
    assert resampled_sums(np.ones(3), 0, "s5").shape == (0,)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=64, max_size=90))
def test_fractions_are_summed_as_right_and_wrong_answers_are(values: list[float]) -> None:
    """Scores of generated texts are hardly ever alike: each has a sum of its own."""
    found = resampled_sums(np.array(values), 50, "s7")
    assert found == pytest.approx(np.array(values) @ resampling._counts(len(values), 50, ("s7",)))
