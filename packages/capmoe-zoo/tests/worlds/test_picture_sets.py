"""The sets have the form of MME, MMBench and SEED-Bench, and most of a picture is redundant."""

import io
from collections import Counter, defaultdict

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.multimodal import scores
from capmoe_eval.zoo.sets import documents
from PIL import Image

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.evaluation import (
    MMBENCH_QUESTIONS,
    SEEDBENCH_QUESTIONS,
    SETS,
    asked,
    rotated,
)
from capmoe_zoo.worlds.pictures.questions import Choice
from capmoe_zoo.worlds.pictures.scene import CELLS


def rows(split="test"):
    sets = documents("pictures", split)
    return (
        sets["lmms-lab/MME"]["default"]["test"],
        sets["lmms-lab/MMBench"]["en"]["dev"],
        sets["lmms-lab/SEED-Bench"]["default"]["test"],
    )


def test_a_picture_of_mme_has_two_questions_and_one_answer_each():
    pictures = defaultdict(list)
    for row in rows()[0]:
        pictures[row["question_id"]].append(row)
    assert len(pictures) == sum(count for _, count in SETS.mme.values()) == 530
    for pair in pictures.values():
        assert [row["answer"] for row in pair] == ["Yes", "No"]
        assert pair[0]["image"] == pair[1]["image"]
        assert pair[0]["question"] != pair[1]["question"]
        assert all(" Is it " in row["question"] for row in pair)
    cognition = Counter(row["category"] for row in rows()[0])
    names = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
    assert [cognition[name] for name in names] == [140, 40, 40, 40]  # as MME's


def test_a_question_of_mmbench_has_four_rotations():
    questions = defaultdict(list)
    for row in rows()[1]:
        questions[row["index"] % scores.ROTATION].append(row)
    assert len(questions) == 6 * MMBENCH_QUESTIONS
    for turns in questions.values():
        assert {row["answer"] for row in turns} == set("ABCD")
        assert len({row[row["answer"]] for row in turns}) == 1
        assert len({(row["question"], row["category"]) for row in turns}) == 1
    assert Counter(row["answer"] for row in rows()[1])["A"] == 6 * MMBENCH_QUESTIONS


def test_a_rotation_moves_the_options_on():
    made = Choice("?", ("a", "b", "c", "d"), "B")
    assert rotated(made, 0) == made
    assert rotated(made, 1) == Choice("?", ("d", "a", "b", "c"), "C")
    assert rotated(made, 3) == Choice("?", ("b", "c", "d", "a"), "A")


def test_seedbench_has_nine_dimensions_of_pictures():
    found = rows()[2]
    assert Counter(row["question_type_id"] for row in found) == dict.fromkeys(
        range(1, 10), SEEDBENCH_QUESTIONS
    )
    letters = Counter(row["answer"] for row in found)
    assert min(letters.values()) > len(found) / 4 - 4 * (len(found) * 3 / 16) ** 0.5
    (stored,) = found[0]["image"]
    assert Image.open(io.BytesIO(stored["bytes"])).size == (96, 96)


def test_the_splits_share_no_picture():
    def pictures(split):
        return {row["image"]["bytes"] for row in rows(split)[0]}

    assert not pictures("dev") & pictures("test")
    with pytest.raises(UsageError, match="split"):
        documents("pictures", "train")


def test_four_fifths_of_a_picture_are_redundant():
    """The cells that show an answer are few; the background and the frame show theirs anywhere."""
    draw = Draw("redundant")
    kinds = [kind for kind, _ in SETS.mme.values()]
    kinds += [kind for parts in SETS.mmbench.values() for own in parts.values() for kind in own]
    shares = [len(asked(kind, draw)[1].cells) / CELLS**2 for kind in kinds for _ in range(10)]
    assert 1 - sum(shares) / len(shares) > 0.8


def test_the_categories_are_those_of_the_tasks():
    assert [*scores.MME["perception"], *scores.MME["cognition"]] == list(SETS.mme)
    assert list(scores.CAPABILITIES) == list(SETS.mmbench)
    assert len(scores.DIMENSIONS) == len(SETS.seedbench)
