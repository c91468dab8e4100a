"""One rule of pairing, and the four that ask it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capmoe_eval.experiment.record import Scored
from capmoe_eval.paper.pairing import Paired, Unpaired, by_document, pair, pool
from capmoe_eval.paper.statistics import contrast


def scored(
    documents: str, scores: Sequence[float], images: Sequence[int] = ()
) -> tuple[str, NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return what a record has of a subtask without batches."""
    return documents, np.array(scores), np.array([], np.int64), np.array(images, np.int64)


BASELINE: Scored = {"a": scored("ha", [1.0, 0.0])}


def test_subtasks_are_joined_by_name_and_seeds_averaged() -> None:
    baseline = {"b": scored("hb", [1.0]), "a": scored("ha", [0.0, 1.0])}
    runs = [
        {"a": scored("ha", [1.0, 1.0]), "b": scored("hb", [0.0])},
        {"b": scored("hb", [0.0]), "a": scored("ha", [0.0, 1.0])},
    ]
    found = pair(runs, [baseline])
    assert isinstance(found, Paired)
    assert found.differences.tolist() == [0.5, 0.0, -1.0]
    assert found.documents == (("a", "ha"), ("b", "hb"))
    assert found.flips == 2 / 3


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], "a side has no evaluation"),
        ([{}], "scores by document are not known"),
        ([{"a": scored("ha", [])}], "scores by document are not known"),
        ([{"a": scored("ha", [1.0])}], "1 and 2 scores for the same documents of a"),
        ([{"a": scored("hx", [1.0, 1.0])}], "other documents of a"),
        (
            [{"a": scored("ha", [1.0, 1.0])}, {"a": scored("hx", [1.0, 1.0])}],
            "other documents of a",
        ),
        ([{"a": scored("ha", [1.0, 1.0]), "b": scored("hb", [1.0])}], "other subtasks: b"),
        ([{"a": scored("ha", [1.0, math.nan])}], "a document's score is not a number"),
        ([{"a": scored("ha", [1.0, math.inf])}], "a document's score is not a number"),
    ],
)
def test_other_documents_are_not_paired_and_the_reason_is_said(
    runs: list[Scored], reason: str
) -> None:
    assert pair(runs, [BASELINE]) == Unpaired(reason)
    assert isinstance(pair([BASELINE], runs), Unpaired)  # from either side


def paired(scores: Sequence[float], documents: str = "h") -> Paired:
    return Paired(((("t", documents)),), np.array(scores), np.zeros(len(scores)))


def test_models_are_averaged_over_the_same_documents_alone() -> None:
    models: dict[str, Mapping[str, Paired]] = {
        "a": {"obqa": paired([1.0, 0.0, 1.0])},
        "b": {"obqa": paired([0.0, 0.0, 1.0]), "rte": paired([1.0, 1.0])},
        "c": {"obqa": paired([-1.0, -1.0], "other")},
    }
    pooled = pool(models)
    assert {task: values.tolist() for task, values in pooled.items()} == {
        "obqa": [0.5, 0.0, 1.0, -1.0, -1.0],
        "rte": [1.0, 1.0],
    }


def test_training_seeds_are_averaged_before_models_are() -> None:
    seeds = {
        name: {"t": paired([value])} for name, value in (("a", 0.0), ("a_s1", 1.0), ("b", 1.0))
    }
    assert pool(seeds)["t"].tolist() == [0.75]


def test_tasks_of_the_same_documents_are_one() -> None:
    tasks = [np.array([1.0, 0.0]), np.array([0.0, 0.0])]
    assert [task.tolist() for task in by_document(tasks)] == [[0.5, 0.0]]
    other = [*tasks, np.zeros(3)]
    assert by_document(other) is other


def of_images(scores: Sequence[float], images: Sequence[int]) -> Scored:
    return {"a": scored("ha", scores, images)}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1)), min_size=1))
def test_images_are_units_and_leave_the_mean_as_it_is(rows: list[tuple[int, int, int]]) -> None:
    images, first, second = (list(column) for column in zip(*rows, strict=True))
    found = pair([of_images(first, images)], [of_images(second, images)])
    assert isinstance(found, Paired)
    assert len(found.units) == len(set(images))
    assert found.units.mean() == pytest.approx(found.differences.mean())
    # A unit is the sum over the documents of its image.
    sums: dict[int, int] = {}
    for image, a, b in rows:
        sums[image] = sums.get(image, 0) + a - b
    assert found.units * len(rows) / len(sums) == pytest.approx(list(sums.values()))


def test_both_answers_to_an_image_are_one_piece_of_evidence() -> None:
    ps = []
    for images in ([n // 2 for n in range(12)], ()):
        sides = (of_images([score] * 12, images) for score in (1.0, 0.0))
        right, wrong = ({"a": [side]} for side in sides)
        found = contrast({"m": (right, wrong)}).comparison
        assert found and found.effect == 100
        ps.append(found.p)
    assert ps == [2 / 2**6, 2 / 2**12]
