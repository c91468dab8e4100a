"""One rule of pairing, and the four that ask it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.experiment.record import Answers, TaskAnswers
from capmoe_eval.paper.pairing import Paired, pair, pool
from tests.records import answered


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
    found = paired_answers(runs, [baseline])
    assert isinstance(found, Paired)
    assert found.differences.tolist() == [0.5, 0.0, -1.0]
    assert found.documents == (("a", "ha"), ("b", "hb"))
    assert found.flips == 2 / 3


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
def test_other_documents_are_not_paired_and_the_reason_is_said(
    runs: list[TaskAnswers], reason: str
) -> None:
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
    found = paired_answers([of_images(first, images)], [of_images(second, images)])
    assert isinstance(found, Paired)
    assert len(found.units) == len(set(images))
    assert found.units.mean() == pytest.approx(found.differences.mean())
    # A unit is the sum over the documents of its image.
    sums: dict[int, int] = {}
    for image, a, b in rows:
        sums[image] = sums.get(image, 0) + a - b
    assert found.units * len(rows) / len(sums) == pytest.approx(list(sums.values()))
