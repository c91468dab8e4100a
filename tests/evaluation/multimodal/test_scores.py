"""The scores of MME, MMBench and SEED-Bench are those of cases that were counted by hand."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.evaluation.multimodal import scores
from capmoe_eval.evaluation.multimodal.scores import Answer

COLOR = [  # three pictures: both right, one right, none right
    Answer("color", "1", 1.0),
    Answer("color", "1", 1.0),
    Answer("color", "2", 1.0),
    Answer("color", "2", 0.0),
    Answer("color", "3", 0.0),
    Answer("color", "3", 0.0),
]
SCENE = [Answer("scene", "1", 1.0), Answer("scene", "1", 0.0)]


def test_a_category_of_mme_is_the_shares_of_questions_and_of_pictures():
    assert scores.mme_score(COLOR) == pytest.approx(100 * 3 / 6 + 100 * 1 / 3)
    assert scores.mme_score(SCENE) == pytest.approx(50)


def test_a_part_of_mme_is_the_sum_of_its_categories():
    assert scores.mme_score(COLOR + SCENE) == pytest.approx(50 + 100 / 3 + 50)


def test_a_picture_whose_second_question_was_left_out_by_a_limit():
    assert scores.mme_score([*COLOR, Answer("color", "4", 1.0)]) == pytest.approx(
        100 * 4 / 7 + 100 * 2 / 4
    )


def by_a_loop(answers):
    total = 0.0
    for category in {answer.category for answer in answers}:
        own = [answer for answer in answers if answer.category == category]
        units = {answer.unit for answer in own}
        whole = sum(all(a.right for a in own if a.unit == unit) for unit in units)
        total += 100 * sum(a.right for a in own) / len(own) + 100 * whole / len(units)
    return total


@given(
    st.lists(
        st.builds(
            Answer,
            st.sampled_from(["color", "scene"]),
            st.sampled_from("123"),
            st.sampled_from([0.0, 1.0]),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_the_score_of_mme_is_that_of_a_loop(answers):
    assert scores.mme_score(answers) == pytest.approx(by_a_loop(answers))


def test_the_standard_error_of_mme_is_of_pictures():
    """Of N pictures the mean score; for the bootstrap the error of a mean is known."""
    chance = random.Random(0)
    answers = []
    for picture in range(200):
        seen = chance.random() < 0.7  # both answers to a picture depend on one cause
        answers += [Answer("color", str(picture), float(seen))] * 2
    each = [200 * answer.right for answer in answers[::2]]
    expected = np.std(each) / math.sqrt(200)
    assert scores.mme_stderr(answers) == pytest.approx(expected, rel=0.1)
    assert scores.mme_stderr(answers) == scores.mme_stderr(answers)
    # Two categories of the same answers: independent, so that the variances add.
    twice = [*answers, *(answer._replace(category="scene") for answer in answers)]
    assert scores.mme_stderr(twice) == pytest.approx(math.sqrt(2) * expected, rel=0.1)


def test_a_question_of_mme():
    doc = {"question_id": "color/1.bmp", "answer": "No", "category": "color"}
    found = scores.mme_results(doc, [" no, it is red"])
    names = ["acc", "color", "perception", "color_stderr", "perception_stderr"]
    assert list(found) == names  # each error after its score, see _with_errors
    assert found["acc"] == 1.0 and found["color"] == Answer("color", "color/1.bmp", 1.0)
    assert scores.mme_results(doc, ["maybe"])["acc"] == 0.0
    cognition = scores.mme_results({**doc, "category": "code_reasoning"}, ["No"])
    assert "cognition" in cognition and "perception" not in cognition


def rotation(turn, answer, right):
    doc = {"index": 7 + turn * 10**6, "answer": right, "L2-category": "relation_reasoning"}
    doc |= dict(zip("ABCD", ["nan", "nan", "nan", "nan"], strict=True)) | {"A": "ball", "B": "car"}
    return scores.mmbench_results(doc, [answer])


def test_a_question_of_mmbench_is_right_if_every_rotation_is():
    right = [rotation(0, "A", "A"), rotation(1, "car", "B")]
    wrong = rotation(2, "A", "B")
    assert [one["acc"] for one in (*right, wrong)] == [1.0, 1.0, 0.0]
    assert scores.circular_score([one["circular"] for one in right]) == 1.0
    assert scores.circular_score([one["RR"] for one in (*right, wrong)]) == 0.0
    others = [Answer("RR", str(unit), float(unit < 3)) for unit in range(3)]
    together = [*(one["RR"] for one in (*right, wrong)), *others]
    assert scores.circular_score(together) == pytest.approx(3 / 4)
    assert scores.circular_stderr(together) == pytest.approx(math.sqrt(3 / 4 * 1 / 4 / 3))
    assert math.isnan(scores.circular_stderr(together[:1]))


def test_a_question_of_seedbench():
    doc = {"answer": "C", "question_type_id": 6}
    doc |= {"choice_a": "up", "choice_b": "down", "choice_c": "left", "choice_d": "right"}
    assert scores.seedbench_results(doc, [" C"]) == {"acc": 1.0, "spatial_relation": 1.0}
    assert scores.seedbench_results(doc, ["left"])["acc"] == 1.0
    assert scores.seedbench_results(doc, ["D"])["acc"] == 0.0
