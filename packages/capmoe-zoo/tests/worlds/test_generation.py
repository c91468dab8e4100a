"""What Table 7 asks is true of the world, can be run, and is not in the corpus."""

from itertools import islice

import pytest

from capmoe_zoo.embedded.miniworld import corpus
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld.evaluation import documents
from capmoe_zoo.worlds.miniworld.world import world

OPEN, DIALOGUES = "google-research-datasets/nq_open", "har1/MTS_Dialogue-Clinical_Note"
FUNCTIONS = "openai/openai_humaneval"


def rows(split, path):
    (splits,) = documents(split)[path].values()
    return splits["validation" if path == OPEN else "test"]


def test_every_set_has_its_documents_in_both_splits():
    for path in (OPEN, DIALOGUES, FUNCTIONS):
        for split in ("dev", "test"):
            assert len(rows(split, path)) == 164


def test_the_answers_of_an_attribute_are_its_value_and_its_phrase():
    fact = next(fact for fact in world().facts if fact.relation.noun == "home")
    row = questions.open_question(fact, 0, Draw("open"), world(), hard=False)
    assert row["question"] == f"what is the home of the {fact.entity}"
    assert row["answer"] == [fact.value, f"in the {fact.value}"]


def test_the_answers_of_a_search_are_all_that_are_right():
    known, several = world(), 0
    for fact in known.facts[::50]:
        row = questions.search(fact, 0, Draw("open"), known, hard=False)
        right = {
            other.entity
            for other in known.facts
            if (other.relation, other.value) == (fact.relation, fact.value)
            and other.entity.split()[0] == fact.entity.split()[0]
        }
        assert set(row["answer"]) == right
        assert len(row["answer"]) == len(right)
        several += len(right) > 1
    assert several


def test_a_note_says_what_was_said_and_what_follows():
    known = world()
    facts = [f for f in known.facts if f.entity == known.facts[0].entity][:4]
    row = questions.dialogue(facts, 1, Draw("talk"))
    for fact in facts:
        assert (
            f"The {fact.relation.noun} of the {fact.entity} is {fact.value}."
            in (row["section_text"])
        )
        assert fact.value in row["dialogue"]
        if fact.relation.broader:
            follows = f"It {fact.relation.broader.verb}s {fact.relation.broader.rest}."
            assert (follows in row["section_text"]) == fact.holds


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_solution_passes_its_test_and_another_does_not(split):
    for row in rows(split, FUNCTIONS):
        names = {}
        exec(row["prompt"] + row["canonical_solution"] + row["test"], names)
        names["check"](names[row["entry_point"]])
        with pytest.raises(AssertionError):
            names["check"](lambda *_: 1_000)


def test_the_functions_of_the_splits_are_apart():
    parts = questions.functions()
    assert len({own for split in parts.values() for own in split}) == sum(map(len, parts.values()))


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


def test_a_prompt_and_its_answer_are_the_document():
    row = rows("dev", OPEN)[0]
    assert questions.prompt("open", row) == (f"Q: {row['question']}?\nA:", f" {row['answer'][0]}")
    row = rows("dev", FUNCTIONS)[0]
    assert questions.prompt("function", row) == (row["prompt"], row["canonical_solution"])
    row = rows("dev", DIALOGUES)[0]
    assert questions.prompt("dialogue", row) == (
        f"{row['dialogue']}\nNote:",
        f" {row['section_text']}",
    )
