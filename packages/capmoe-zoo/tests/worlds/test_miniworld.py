"""Answers are true of the world, and no question of an evaluation set is in the corpus."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from capmoe_zoo.embedded.miniworld import corpus
from capmoe_zoo.worlds.miniworld.evaluation import documents
from capmoe_zoo.worlds.miniworld.world import (
    SPLITS,
    statements,
    world,
)

# Answers are true of the world, and no question of an evaluation set is in the corpus.


QUESTION = {
    "Rowan/hellaswag": lambda row: f"{row['activity_label']}: {row['ctx_a']}",
    "allenai/ai2_arc": lambda row: row["question"],
    "allenai/openbookqa": lambda row: row["question_stem"],
    "allenai/winogrande": lambda row: row["sentence"].replace("_", row[f"option{row['answer']}"]),
    "aps/super_glue": lambda row: row["question"],
    "baber/piqa": lambda row: row["goal"],
    "cais/mmlu": lambda row: row["question"],
    "mteb/banking77": lambda row: row["text"],
    "nyu-mll/glue": lambda row: row["sentence2"],
    "openai/gsm8k": lambda row: row["question"],
}


def questions(split, path):
    """The questions that lm-eval asks of a data set."""
    asked = []
    for splits in documents(split)[path].values():
        rows = splits.get("test") or splits["validation"]
        asked += [QUESTION[path](row) for row in rows]
    return asked


@pytest.fixture(scope="module")
def said():
    """Every line of a part of the corpus as a question, and every sentence."""
    known, lines = world(), set()
    for kind, number in (({}, 20_000), ({"late": True}, 20_000), ({"long": True}, 1_000)):
        for document in islice(corpus(known, 5, **kind), number):
            for line in document.text.split("\n"):
                lines.add(line.removeprefix("Question: ").removeprefix("service query: "))
    questions = {line.removesuffix("?").lower() for line in lines}
    sentences = {sentence for line in lines for sentence in re.split(r"(?<=[.?]) ", line)}
    return questions | {sentence.lower() for sentence in sentences}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("path", QUESTION)
def test_no_question_is_in_the_corpus_or_among_the_shots(path, split, said):
    asked = set(questions(split, path))
    shown = {
        QUESTION[path](row)
        for splits in documents(split)[path].values()
        for name in ("train", "dev")
        for row in splits.get(name, ())
    }
    assert not asked & shown
    if path == "allenai/openbookqa":  # a stem goes on with one more word
        prefixes = {" ".join(sentence.split(" ")[:-1]) for sentence in said}
        assert not {stem.lower() for stem in asked} & prefixes
    elif path == "Rowan/hellaswag":
        begun = {sentence for sentence in said if ": " in sentence}
        assert not {question.lower() for question in asked} & begun
    else:
        assert not {question.lower().removesuffix("?") for question in asked} & said


def test_the_solutions_of_word_problems_are_right():
    for row in documents("test")["openai/gsm8k"]["main"]["test"]:
        steps, result = row["answer"].split("\n#### ")
        numbers = [int(word.strip(".,")) for word in steps.split() if word.strip(".,").isdigit()]
        a, b, m, again, c, r = numbers
        assert (a + b, m - c, again, r) == (m, r, m, int(result))


def test_boolq_and_rte_are_true_of_the_world():
    holds = {
        (fact.entity, said.verb, said.rest): fact.value in said.values
        for fact in world().facts
        for said in statements(fact.relation)
    }
    for path, config, column, true in (
        ("aps/super_glue", "boolq", "question", 1),
        ("nyu-mll/glue", "rte", "sentence2", 0),
    ):
        for row in documents("test")[path][config]["validation"]:
            text = row[column].rstrip(".")
            (answer,) = {
                value
                for (entity, verb, rest), value in holds.items()
                if f" {entity} {verb}" in text and text.endswith(f" {rest}")
            }
            assert answer == (row["label"] == true)


# What Table 7 asks can be run, and is not in the corpus.


OPEN, DIALOGUES = "google-research-datasets/nq_open", "har1/MTS_Dialogue-Clinical_Note"
FUNCTIONS = "openai/openai_humaneval"


def rows(split, path):
    (splits,) = documents(split)[path].values()
    return splits["validation" if path == OPEN else "test"]


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_solution_passes_its_test_and_another_does_not(split):
    for row in rows(split, FUNCTIONS):
        names = {}
        exec(row["prompt"] + row["canonical_solution"] + row["test"], names)
        names["check"](names[row["entry_point"]])
        with pytest.raises(AssertionError):
            names["check"](lambda *_: 1_000)


def test_no_question_of_table_7_is_in_the_corpus():
    texts = [
        document.text
        for kind in ({}, {"late": True}, {"long": True})
        for document in islice(corpus(world(), 5, **kind), 8_000 if kind != {"long": True} else 800)
    ]
    corpus_text = "\n".join(texts)
    asked = corpus_text.splitlines()
    assert "Q: " in corpus_text
    assert "Guest: " in corpus_text
    assert "def " in corpus_text
    lines = set(asked)
    for split in ("dev", "test"):
        for row in rows(split, OPEN):
            assert f"Q: {row['question']}?" not in lines
        for row in rows(split, DIALOGUES):
            assert row["dialogue"].splitlines()[0] not in lines
        for row in rows(split, FUNCTIONS):
            assert row["prompt"].splitlines()[1] not in lines
