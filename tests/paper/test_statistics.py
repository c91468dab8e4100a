"""Known answers, naive tests beside the vectorised ones, and what must hold for any differences."""

import itertools
import math
from collections.abc import Mapping, Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capmoe_eval.experiment.record import Answers, TaskAnswers
from capmoe_eval.paper import statistics
from capmoe_eval.paper.pairing import Paired, pair, pool
from capmoe_eval.paper.statistics import holm, mcnemar, sign_flip
from tests.records import answered

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
    with mock.patch.object(statistics, "LATTICE", 0):
        # Four standard errors of 10,000 draws, and the one that counts itself.
        error = 4 * math.sqrt(exact * (1 - exact) / statistics.DRAWS) + 2e-4
        assert flipped(tasks) == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("lattice", [0, statistics.LATTICE])
@given(tasks=TASKS, data=st.data())
@settings(max_examples=20, deadline=None)
def test_p_depends_on_the_differences_alone(
    lattice: int, tasks: list[list[float]], data: st.DataObject
) -> None:
    """Not on the order of tasks and documents, the side that is called first, or the unit."""
    shuffled = [data.draw(st.permutations(task)) for task in data.draw(st.permutations(tasks))]
    with mock.patch.object(statistics, "LATTICE", lattice):
        p = flipped(tasks)
        for same in (shuffled, *([[x * value for value in t] for t in tasks] for x in (-1, 100))):
            assert flipped(same) == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize(
    ("ps", "corrected"),
    [([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]), ([], []), ([0.9, 0.8], [1.0, 1.0])],
)
def test_holm_by_hand(ps: list[float], corrected: list[float]) -> None:
    assert holm(ps) == pytest.approx(corrected)


# One rule of pairing, and the four that ask it.


def answers(documents: str, scores: Sequence[float], images: Sequence[int] = ()) -> Answers:
    """The answers of a subtask without batches."""
    return Answers(documents=documents, correct=list(scores), images=list(images) or None)


def paired_answers(first: Sequence[TaskAnswers], second: Sequence[TaskAnswers]) -> Paired | str:
    return pair(*(list(map(answered, side)) for side in (first, second)))


BASELINE: TaskAnswers = {"a": answers("ha", [1.0, 0.0])}


def test_subtasks_are_joined_by_name_and_seeds_averaged() -> None:
    baseline = {"b": answers("hb", [1.0]), "a": answers("ha", [0.0, 1.0])}
    runs = [
        {"a": answers("ha", [1.0, 1.0]), "b": answers("hb", [0.0])},
        {"b": answers("hb", [0.0]), "a": answers("ha", [0.0, 1.0])},
    ]
    paired = paired_answers(runs, [baseline])
    assert isinstance(paired, Paired)
    assert paired.differences.tolist() == [0.5, 0.0, -1.0]
    assert paired.documents == (("a", "ha"), ("b", "hb"))
    assert paired.flips == 2 / 3


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], "a side has no evaluation"),
        ([{"a": answers("ha", [1.0])}], "1 and 2 scores for the same documents of a"),
        ([{"a": answers("hx", [1.0, 1.0])}], "other documents of a"),
        (
            [{"a": answers("ha", [1.0, 1.0])}, {"a": answers("hx", [1.0, 1.0])}],
            "other documents of a",
        ),
        ([{"a": answers("ha", [1.0, 1.0]), "b": answers("hb", [1.0])}], "other subtasks: b"),
    ],
)
def test_other_documents_are_not_paired_for_a_reason(runs: list[TaskAnswers], reason: str) -> None:
    assert paired_answers(runs, [BASELINE]) == reason
    assert isinstance(paired_answers([BASELINE], runs), str)  # from either side


def paired(scores: Sequence[float], documents: str = "h") -> Paired:
    return Paired(((("t", documents)),), np.array(scores), np.zeros(len(scores)))


def test_models_add_up_over_the_same_documents_alone() -> None:
    """Each of three models is a third; b has two tasks, of which each is a half of that."""
    models: dict[str, Mapping[str, Paired]] = {
        "a": {"obqa": paired([1.0, 0.0, 1.0])},
        "b": {"obqa": paired([0.0, 0.0, 1.0]), "rte": paired([1.0, 1.0])},
        "c": {"obqa": paired([-1.0, -1.0], "other")},
    }
    parts = [(task, documents[0][1], *values) for (task, documents), values in pool(models).items()]
    assert parts == [
        ("obqa", "h", pytest.approx(1 / 3), 0.0, pytest.approx(1 / 2)),
        ("rte", "h", pytest.approx(1 / 6), pytest.approx(1 / 6)),
        ("obqa", "other", pytest.approx(-1 / 3), pytest.approx(-1 / 3)),
    ]


def of_images(scores: Sequence[float], images: Sequence[int]) -> TaskAnswers:
    return {"a": answers("ha", scores, images)}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1)), min_size=1))
def test_images_are_units_and_leave_the_mean_as_it_is(rows: list[tuple[int, int, int]]) -> None:
    images, first, second = (list(column) for column in zip(*rows, strict=True))
    paired = paired_answers([of_images(first, images)], [of_images(second, images)])
    assert isinstance(paired, Paired)
    assert len(paired.units) == len(set(images))
    assert paired.units.mean() == pytest.approx(paired.differences.mean())
    # A unit is the sum over the documents of its image.
    sums: dict[int, int] = {}
    for image, a, b in rows:
        sums[image] = sums.get(image, 0) + a - b
    assert paired.units * len(rows) / len(sums) == pytest.approx(list(sums.values()))
