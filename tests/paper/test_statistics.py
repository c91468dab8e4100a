"""Known answers, a naive test beside the vectorised one, and what must hold for any differences."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from capmoe_eval.paper import statistics as paired
from capmoe_eval.paper.statistics import compare, holm, mcnemar, share_of, sign_flip


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == mcnemar(7, 8) == 1.0
    assert mcnemar(0, 6) == pytest.approx(2 / 64)  # all six changed the same way
    assert mcnemar(1, 7) == pytest.approx(2 * (1 + 8) / 256)
    assert mcnemar(2000, 0) == pytest.approx(0.0, abs=1e-300)


def naive_sign_flip(tasks: list[list[float]]) -> float:
    """The sign-flip test by its definition: every choice of signs, counted."""
    weights = [value / (len(task) * len(tasks)) for task in tasks for value in task]
    observed = abs(sum(weights))
    sums = [
        abs(sum(sign * weight for sign, weight in zip(signs, weights, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(weights))
    ]
    return sum(total >= observed - 1e-12 for total in sums) / len(sums)


def flipped(tasks: list[list[float]]) -> float:
    return sign_flip([np.array(task) for task in tasks])


def test_one_task_of_right_and_wrong_is_mcnemars() -> None:
    """Eight lost, one gained: 2 · (C(9, 0) + C(9, 1)) / 2⁹."""
    moved = [-1.0] * 8 + [1.0] + [0.0] * 20
    assert flipped([moved]) == pytest.approx(2 * (1 + 9) / 2**9, rel=1e-12)
    assert flipped([[0.0] * 5, [0.0] * 3]) == 1.0


SCORES = st.sampled_from([-1.0, -2 / 3, -0.2, -1 / 15, 0.0, 1 / 3, 0.6, 1.0])
TASKS = st.lists(st.lists(SCORES, min_size=1, max_size=5), min_size=1, max_size=2)


@given(TASKS)
@settings(max_examples=80, deadline=None)
def test_means_of_right_and_wrong_are_tested_exactly(tasks: list[list[float]]) -> None:
    assert flipped(tasks) == pytest.approx(naive_sign_flip(tasks), abs=1e-12)


@given(TASKS)
@example([[-0.2, -0.2, -0.2, 0.6]])  # their sum is 5e-17
@settings(max_examples=40, deadline=None)
def test_drawn_signs_agree_with_all_of_them(tasks: list[list[float]]) -> None:
    exact = naive_sign_flip(tasks)
    with mock.patch.object(paired, "LATTICE", 0):
        # Four standard errors of 10,000 draws, and the one that counts itself.
        error = 4 * math.sqrt(exact * (1 - exact) / paired.RESAMPLES) + 2e-4
        assert flipped(tasks) == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("lattice", [0, paired.LATTICE])
@given(tasks=TASKS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_p_depends_on_the_differences_alone(
    lattice: int, tasks: list[list[float]], data: st.DataObject
) -> None:
    """Not on the order of tasks and documents, the side that is called first, or the unit."""
    shuffled = [data.draw(st.permutations(task)) for task in data.draw(st.permutations(tasks))]
    with mock.patch.object(paired, "LATTICE", lattice):
        p = flipped(tasks)
        assert flipped(shuffled) == pytest.approx(p, rel=1e-9)
        assert flipped([[-value for value in task] for task in tasks]) == pytest.approx(p, rel=1e-9)
        assert flipped([[100 * value for value in task] for task in tasks]) == pytest.approx(
            p, rel=1e-9
        )
        found = compare({str(number): task for number, task in enumerate(tasks)})
        assert found.p == p  # the one test


def test_many_models_seeds_and_tasks_are_exact_still() -> None:
    """Beside a normal approximation with its correction; 10,000 draws could say 1e-4 at least."""
    rng = np.random.default_rng(5)
    tasks = [rng.choice(np.arange(-14, 16) / 15, size=size) for size in (300, 300, 150)]
    deviation = math.sqrt(sum(((task / len(task)) ** 2).sum() for task in tasks))
    z = abs(sum(task.mean() for task in tasks)) / deviation
    with mock.patch.object(paired, "_drawn", side_effect=AssertionError("drawn")):
        assert sign_flip(tasks) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.02)
        assert sign_flip([*tasks, np.ones(60)]) < 1e-9


def test_no_documents_are_refused_by_the_test() -> None:
    for tasks in ([], [[]], [[1.0], []]):
        with pytest.raises(ValueError, match="every task needs documents"):
            flipped(tasks)


def test_scores_of_any_value_are_drawn() -> None:
    values = np.random.default_rng(1).normal(size=8).tolist()
    assert flipped([values]) == pytest.approx(naive_sign_flip([values]), abs=0.02)
    assert flipped([values]) == flipped([values])


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
    assert one.p == other.p


def test_a_large_set_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 0.25, -0.5] * 10
    monkeypatch.setattr(paired, "LATTICE", 0)
    whole = compare({"t": values})
    monkeypatch.setattr(paired, "_PART", 100)
    parts = compare({"t": values})
    assert parts.p == pytest.approx(whole.p, abs=0.02)


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


def naive_share(part: list[float], whole: list[float], task: str) -> tuple[float, float, float]:
    """The share and its interval, from resamples that are listed one by one."""
    drawn = [
        paired.resampled_sums(np.eye(len(whole))[unit], 10_000, task) for unit in range(len(whole))
    ]
    low, high = [], []
    for counts in np.array(drawn).T:
        lost = sum(n * value for n, value in zip(counts, whole, strict=True))
        share = (
            sum(n * value for n, value in zip(counts, part, strict=True)) / lost
            if lost > 1e-9
            else None
        )
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
@settings(max_examples=8, deadline=None)
def test_a_share_is_that_of_each_resample(pairs: list[tuple[int, int]]) -> None:
    part, whole = ([float(one[side]) for one in pairs] for side in (0, 1))
    assume(sum(whole) > 0)
    found = share_of(np.array(part), np.array(whole), "t")
    assert found == pytest.approx(naive_share(part, whole, "t"))


def test_the_share_of_all_and_of_nothing_is_certain() -> None:
    whole = np.array([1.0, 1.0, 1.0, 0.0, 1.0] * 8)
    assert share_of(whole, whole, "t") == (1, 1, 1)
    assert share_of(0 * whole, whole, "t") == (0, 0, 0)
    assert share_of(whole / 4, whole, "t") == pytest.approx((0.25, 0.25, 0.25))
