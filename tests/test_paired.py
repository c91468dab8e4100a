"""Known answers, a naive test beside the vectorised one, and what must hold for any differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval import paired
from capmoe_eval.paired import compare, holm, mcnemar


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 6) == 2 / 64  # all six changed the same way
    assert mcnemar(1, 7) == pytest.approx(2 * (1 + 8) / 256)
    assert mcnemar(2000, 0) == pytest.approx(0.0, abs=1e-300)


def naive_sign_flip(values: list[float]) -> float:
    """Every assignment of signs, counted."""
    observed = abs(sum(values))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(values))
    ]
    return sum(total >= observed - 1e-12 for total in sums) / len(sums)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=10))
@settings(max_examples=60, deadline=None)
def test_the_exact_test_counts_all_signs(values: list[float]) -> None:
    assert compare({"task": values}).p == pytest.approx(naive_sign_flip(values))


def test_random_flips_agree_with_all_of_them() -> None:
    values = [0.5, 1.0, -1 / 3, 1.0, 2 / 3, -1 / 3, 1.0, 1 / 3, 1.0]
    assert compare({"task": values}).p == pytest.approx(naive_sign_flip(values), abs=0.02)


def test_tasks_count_equally() -> None:
    found = compare({"small": [1.0, 1.0], "large": [0.0] * 100})
    assert found.effect == 0.5
    assert found.documents == 102


def test_the_interval_is_that_of_a_mean() -> None:
    values = np.random.default_rng(0).normal(0.2, 1.0, size=400)
    found = compare({"task": values.tolist()})
    error = values.std() / math.sqrt(len(values))
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.02)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.02)


def test_no_difference_is_none() -> None:
    found = compare({"a": [0.0] * 5, "b": [0.0] * 7})
    assert (found.effect, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_the_sign_turns_with_the_sides() -> None:
    values = [1.0, 0.5, 0.0, -0.5, 1.0, 1.0]
    one, other = compare({"t": values}), compare({"t": [-value for value in values]})
    assert one.effect == -other.effect
    assert one.p == pytest.approx(other.p, abs=0.02)


def test_a_large_set_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 0.25, -0.5] * 10
    whole = compare({"t": values})
    monkeypatch.setattr(paired, "_PART", 100)
    assert compare({"t": values}).p == pytest.approx(whole.p, abs=0.02)


def test_a_task_without_documents_is_refused() -> None:
    with pytest.raises(ValueError, match="every task needs documents"):
        compare({"t": []})


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_keeps_the_order_and_never_lowers(ps: list[float]) -> None:
    corrected = holm(ps)
    assert all(after >= before for before, after in zip(ps, corrected, strict=True))
    ranked = sorted(range(len(ps)), key=lambda index: ps[index])
    assert [corrected[i] for i in ranked] == sorted(corrected)
