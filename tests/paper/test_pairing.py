"""One rule of pairing, and the four that ask it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from capmoe_eval.paper.pairing import Documents, Paired, Unpaired, by_document, pair, pool

BASELINE: Documents = {"a": ("ha", [1.0, 0.0])}


def test_subtasks_are_joined_by_name_and_seeds_averaged() -> None:
    baseline = {"b": ("hb", [1.0]), "a": ("ha", [0.0, 1.0])}
    runs = [
        {"a": ("ha", [1.0, 1.0]), "b": ("hb", [0.0])},
        {"b": ("hb", [0.0]), "a": ("ha", [0.0, 1.0])},
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
        ([{"a": ("ha", [])}], "scores by document are not known"),
        ([{"a": ("ha", [1.0])}], "1 and 2 scores for the same documents of a"),
        ([{"a": ("hx", [1.0, 1.0])}], "other documents of a"),
        ([{"a": ("ha", [1.0, 1.0])}, {"a": ("hx", [1.0, 1.0])}], "other documents of a"),
        ([{"a": ("ha", [1.0, 1.0]), "b": ("hb", [1.0])}], "other subtasks: b"),
        ([{"a": ("ha", [1.0, math.nan])}], "a document's score is not a number"),
        ([{"a": ("ha", [1.0, math.inf])}], "a document's score is not a number"),
    ],
)
def test_other_documents_are_not_paired_and_the_reason_is_said(
    runs: list[Documents], reason: str
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
