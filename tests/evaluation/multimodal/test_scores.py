"""Answers are read by fixed rules, and scores are those of cases that were counted by hand."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.evaluation.multimodal import scores
from capmoe_eval.evaluation.multimodal.scores import first_word, option, yes_or_no

COLORS = {"A": "red", "B": "dark blue", "C": "blue", "D": "a cat"}
READ = {
    yes_or_no: [
        ("yes", "yes"),
        (" Yes, it is.", "yes"),
        ("NO", "no"),
        ("\n**No**", "no"),
        ("not at all", None),
        ("yesterday", None),
        ("I think yes", None),
        ("", None),
    ],
    lambda answer: option(answer, COLORS): [
        (" B", "B"),
        ("(C)", "C"),
        ("The answer is D.", "D"),
        ("b", None),
        ("A or B", None),
        ("A", "A"),
        ("A red thing.", "A"),  # three words
        ("A thing that is red", "A"),  # by its text: here A is an article
        ("A thing that is pink", None),
        ("It is Red", "A"),
        ("dark blue", None),  # blue is in it, too
        ("blue", "C"),
        ("E", None),
        ("", None),
    ],
    first_word: [
        (" Red cross", "red"),
        ("yes.", "yes"),
        ("\n- No, it is not", "no"),
        (" \n?", None),
    ],
}


@pytest.mark.parametrize(
    ("reads", "answer", "value"), [(reads, *row) for reads, rows in READ.items() for row in rows]
)
def test_an_answer_is_read_by_its_rule(reads, answer, value):
    assert reads(answer) == value


def by_a_loop(answers):
    total = 0.0
    for category in {category for category, _, _ in answers}:
        answered = [(unit, right) for of, unit, right in answers if of == category]
        units = {unit for unit, _ in answered}
        whole = sum(all(right for of, right in answered if of == unit) for unit in units)
        share = sum(right for _, right in answered) / len(answered)
        total += 100 * share + 100 * whole / len(units)
    return total


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["color", "scene"]), st.sampled_from("123"), st.sampled_from([0.0, 1.0])
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
        answers += [("color", str(picture), float(seen))] * 2
    each = [200 * right for _, _, right in answers[::2]]
    expected = np.std(each) / math.sqrt(200)
    assert scores.mme_stderr(answers) == pytest.approx(expected, rel=0.1)
    assert scores.mme_stderr(answers) == scores.mme_stderr(answers)
    # Two categories of the same answers: independent, so that the variances add.
    twice = [*answers, *(("scene", *answer) for _, *answer in answers)]
    assert scores.mme_stderr(twice) == pytest.approx(math.sqrt(2) * expected, rel=0.1)


def test_a_question_of_mme():
    doc = {"question_id": "color/1.bmp", "answer": "No", "category": "color"}
    metrics = scores.mme_results(doc, [" no, it is red"])
    names = ["acc", "color", "perception", "color_stderr", "perception_stderr"]
    assert list(metrics) == names  # each error after its score, see _with_errors
    assert metrics["acc"] == 1.0
    assert metrics["color"] == ("color", "color/1.bmp", 1.0)
    assert scores.mme_results(doc, ["maybe"])["acc"] == 0.0
    cognition = scores.mme_results({**doc, "category": "code_reasoning"}, ["No"])
    assert "cognition" in cognition
    assert "perception" not in cognition


def rotation(turn, answer, right):
    doc = {"index": 7 + turn * 10**6, "answer": right, "L2-category": "relation_reasoning"}
    doc |= dict(zip("ABCD", ["nan", "nan", "nan", "nan"], strict=True)) | {"A": "ball", "B": "car"}
    return scores.mmbench_results(doc, [answer])


def test_a_question_of_mmbench_is_right_if_every_rotation_is():
    right = [rotation(0, "A", "A"), rotation(1, "car", "B")]
    wrong = rotation(2, "A", "B")
    assert [scored["acc"] for scored in (*right, wrong)] == [1.0, 1.0, 0.0]
    assert scores.circular_score([scored["circular"] for scored in right]) == 1.0
    assert scores.circular_score([scored["RR"] for scored in (*right, wrong)]) == 0.0
    others = [("RR", str(unit), float(unit < 3)) for unit in range(3)]
    together = [*(scored["RR"] for scored in (*right, wrong)), *others]
    assert scores.circular_score(together) == pytest.approx(3 / 4)
    assert scores.circular_stderr(together) == pytest.approx(math.sqrt(3 / 4 * 1 / 4 / 3))
    assert math.isnan(scores.circular_stderr(together[:1]))


def test_a_question_of_seedbench():
    doc = {"answer": "C", "question_type_id": 6}
    doc |= {"choice_a": "up", "choice_b": "down", "choice_c": "left", "choice_d": "right"}
    assert scores.seedbench_results(doc, [" C"]) == {"acc": 1.0, "spatial_relation": 1.0}
    assert scores.seedbench_results(doc, ["left"])["acc"] == 1.0
    assert scores.seedbench_results(doc, ["D"])["acc"] == 0.0
