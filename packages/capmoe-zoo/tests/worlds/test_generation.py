"""What Table 7 asks can be run, and is not in the corpus."""

from itertools import islice

import pytest

from capmoe_zoo.embedded.miniworld import corpus
from capmoe_zoo.worlds.miniworld.evaluation import documents
from capmoe_zoo.worlds.miniworld.world import world

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
    said = "\n".join(texts)
    asked = said.splitlines()
    assert "Q: " in said
    assert "Guest: " in said
    assert "def " in said
    lines = set(asked)
    for split in ("dev", "test"):
        for row in rows(split, OPEN):
            assert f"Q: {row['question']}?" not in lines
        for row in rows(split, DIALOGUES):
            assert row["dialogue"].splitlines()[0] not in lines
        for row in rows(split, FUNCTIONS):
            assert row["prompt"].splitlines()[1] not in lines
