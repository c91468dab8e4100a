from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.paired import compare
from capmoe_eval.report.significance import differences, p_value


def flipped_exactly(tasks: list[np.ndarray]) -> float:
    """The sign-flip test by its definition: every choice of signs, counted."""
    weights = np.concatenate([task / (len(task) * len(tasks)) for task in tasks])
    observed = abs(weights.sum())
    signs = itertools.product((-1, 1), repeat=len(weights))
    sums = [abs(float(np.dot(sign, weights))) for sign in signs]
    return sum(total >= observed - 1e-12 for total in sums) / len(sums)


def test_one_task_of_right_and_wrong_is_mcnemars() -> None:
    """Eight lost, one gained: 2 · (C(9, 0) + C(9, 1)) / 2⁹."""
    moved = np.array([-1.0] * 8 + [1.0] + [0.0] * 20)
    assert p_value([moved]) == 2 * (1 + 9) / 2**9


def test_nothing_moved_is_no_difference() -> None:
    assert p_value([np.zeros(5)]) == 1.0
    assert p_value([np.zeros(5), np.zeros(3)]) == 1.0


thirds = st.lists(st.sampled_from([-1.0, -2 / 3, -1 / 3, 0.0, 1 / 3, 1.0]), min_size=1, max_size=5)


@given(st.lists(thirds, min_size=1, max_size=2))
def test_flips_are_those_of_the_definition(scores: list[list[float]]) -> None:
    tasks = [np.round(np.array(task), 9) for task in scores]
    exact = flipped_exactly(tasks)
    # Four standard errors of 10,000 draws, and the one that counts itself.
    assert p_value(tasks) == pytest.approx(
        exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000) + 2e-4
    )


def test_p_is_that_of_the_paired_comparison() -> None:
    """Both draw their flips at random, so they agree to their own standard error."""
    rng = np.random.default_rng(5)
    tasks = [rng.choice([-1, -1 / 3, 0, 1 / 3], size=size) for size in (60, 200)]
    tasks = [np.round(task + 0.27 * (rng.random(len(task)) < 0.8), 9) for task in tasks]
    other = compare({str(index): task.tolist() for index, task in enumerate(tasks)}).p
    assert 0.001 < other < 0.999
    assert p_value(tasks) == pytest.approx(other, abs=0.03)


def test_the_same_scores_give_the_same_p() -> None:
    task = np.array([0.5, -0.5, 0.5, 1.0, 0.5])
    assert p_value([task]) == p_value([task])


@pytest.mark.parametrize("tasks", [[], [np.zeros(0)]])
def test_no_documents_are_refused(tasks: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="every task needs documents"):
        p_value(tasks)


def test_subtasks_are_joined_by_name_and_seeds_averaged() -> None:
    baseline = {"b": ("hb", [1.0]), "a": ("ha", [0.0, 1.0])}
    runs = [
        {"a": ("ha", [1.0, 1.0]), "b": ("hb", [0.0])},
        {"b": ("hb", [0.0]), "a": ("ha", [0.0, 1.0])},
    ]
    moved = differences(runs, baseline)
    assert moved is not None
    assert moved.tolist() == [0.5, 0.0, -1.0]


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [{}],
        [{"a": ("ha", [1.0])}],
        [{"a": ("hx", [1.0, 1.0])}],
        [{"a": ("ha", [1.0, 1.0])}, {"a": ("hx", [1.0, 1.0])}],
        [{"a": ("ha", [1.0, 1.0]), "b": ("hb", [1.0])}],
        [{"a": ("ha", [1.0, math.nan])}],
    ],
)
def test_other_documents_are_not_paired(runs: list[dict[str, tuple[str, list[float]]]]) -> None:
    assert differences(runs, {"a": ("ha", [1.0, 0.0])}) is None
