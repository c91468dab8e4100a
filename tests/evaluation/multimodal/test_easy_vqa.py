"""easy-VQA is read from its package; without it, one line says what to install."""

import sys
from collections import Counter
from types import SimpleNamespace

import lm_eval.evaluator
import pytest
from PIL import Image

from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.zoo.hub import ready
from capmoe_eval.zoo.sets import documents
from tests.evaluation.answering import Answering

QUESTIONS = [
    ("what shape is present?", "circle", 0),
    ("is there a circle?", "no", 1),
    ("what color is the shape?", "red", 1),
    ("is no red shape present?", "yes", 1),
]


@pytest.fixture(name="package")
def stand_in(tmp_path, monkeypatch):
    """A package with the functions of easy-VQA's, and four questions about two pictures."""
    paths = {number: str(tmp_path / f"{number}.png") for number in (0, 1)}
    for number, path in paths.items():
        Image.new("RGB", (64, 64), (200 * number, 0, 0)).save(path)
    package = SimpleNamespace(
        get_test_questions=lambda: tuple(map(list, zip(*QUESTIONS, strict=True))),
        get_test_image_paths=lambda: paths,
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    return package


def evaluated(answer):
    tasks = TaskLibrary().get("easy_vqa", ready(data_source("easy_vqa")))
    model = Answering(answer)
    return model, lm_eval.evaluator.evaluate(lm=model, task_dict=tasks, limit=200)


def test_answers_are_scored_by_their_first_word_and_by_kind(package):
    model, result = evaluated(lambda doc: "Red or no" if doc["answer"] == "red" else " No.")
    expected = {"acc": 0.5, "color": 1, "shape": 0, "yes_no": 0.5}
    results = result["results"]["easy_vqa"]
    assert {name: results[f"{name},none"] for name in expected} == expected
    text, _, visual = model.requests[0]
    assert text == "<image>\nwhat shape is present?\nAnswer:"
    assert visual["visual"][0].size == (64, 64)
    assert model.requests[1][2]["visual"][0].getpixel((0, 0)) == (200, 0, 0)


def test_the_package_has_what_is_read_of_it():
    pytest.importorskip("easy_vqa", reason="needs pip install -e '.[easy-vqa]'")
    _, result = evaluated(lambda doc: doc["answer"])
    assert result["results"]["easy_vqa"]["acc,none"] == 1
    rows = documents("easy_vqa")["vzhou842/easy-VQA"]["default"]["test"]
    kinds = Counter(row["kind"] for row in rows)
    assert kinds == {"yes_no": 7136, "shape": 1257, "color": 1280}
