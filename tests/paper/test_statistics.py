"""Known answers, naive tests beside the vectorised ones, and what must hold for any differences."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capmoe_eval.paper import statistics as paired
from capmoe_eval.paper.statistics import holm, mcnemar, sign_flip

SCORES = st.sampled_from([-1.0, -2 / 3, -0.2, -1 / 15, 0.0, 1 / 3, 0.6, 1.0])
TASKS = st.lists(st.lists(SCORES, min_size=1, max_size=5), min_size=1, max_size=2)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (7, 8, 1.0),
        (0, 6, 2 / 64),  # all six changed the same way
        (1, 7, 2 * (1 + 8) / 256),
        (2000, 0, 0.0),
    ],
)
def test_mcnemar_by_hand(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p, abs=1e-300)


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


@given(TASKS)
@settings(max_examples=80, deadline=None)
def test_means_of_right_and_wrong_are_tested_exactly(tasks: list[list[float]]) -> None:
    assert flipped(tasks) == pytest.approx(naive_sign_flip(tasks), abs=1e-12)


@given(TASKS)
@example([[-0.2, -0.2, -0.2, 0.6]])  # their sum is 5e-17
@settings(max_examples=30, deadline=None)
def test_drawn_signs_agree_with_all_of_them(tasks: list[list[float]]) -> None:
    exact = naive_sign_flip(tasks)
    with mock.patch.object(paired, "LATTICE", 0):
        # Four standard errors of 10,000 draws, and the one that counts itself.
        error = 4 * math.sqrt(exact * (1 - exact) / paired.DRAWS) + 2e-4
        assert flipped(tasks) == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("lattice", [0, paired.LATTICE])
@given(tasks=TASKS, data=st.data())
@settings(max_examples=20, deadline=None)
def test_p_depends_on_the_differences_alone(
    lattice: int, tasks: list[list[float]], data: st.DataObject
) -> None:
    """Not on the order of tasks and documents, the side that is called first, or the unit."""
    shuffled = [data.draw(st.permutations(task)) for task in data.draw(st.permutations(tasks))]
    with mock.patch.object(paired, "LATTICE", lattice):
        p = flipped(tasks)
        for same in (shuffled, *([[x * value for value in t] for t in tasks] for x in (-1, 100))):
            assert flipped(same) == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize(
    ("ps", "corrected"),
    [([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]), ([], []), ([0.9, 0.8], [1.0, 1.0])],
)
def test_holm_by_hand(ps: list[float], corrected: list[float]) -> None:
    assert holm(ps) == pytest.approx(corrected)
