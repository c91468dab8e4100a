"""The world is the same everywhere, and no question of an evaluation set is in the corpus."""

import hashlib
import itertools
import json
import re
from itertools import islice

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_zoo.embedded.miniworld import corpus
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld.evaluation import documents, number_triples
from capmoe_zoo.worlds.miniworld.world import (
    LEXICON,
    RELATIONS,
    SPLIT_WORDING,
    SPLITS,
    TRAIN_WORDINGS,
    WORDINGS,
    _names,
    say,
    statements,
    world,
)

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


def test_every_kind_of_sentence_has_the_wordings_of_the_corpus_and_of_both_splits():
    count = len(TRAIN_WORDINGS) + len(SPLITS)
    fewer = {"solutions", "rules", "note", "follows"}
    for name, wordings in vars(WORDINGS).items():
        assert name in fewer or len(set(wordings)) == len(wordings) == count, name
    assert sorted([*TRAIN_WORDINGS, *SPLIT_WORDING.values()]) == list(range(count))


def test_an_entity_has_one_value_of_each_relation_of_its_kind():
    known = world()
    for facts in known.by_entity.values():
        (kind,) = {fact.relation.kind for fact in facts}
        relations = [fact.relation for fact in facts]
        assert relations == [relation for relation in RELATIONS if relation.kind == kind]
        assert all(fact.value in fact.relation.values for fact in facts)


def test_the_tool_follows_from_the_action_and_the_material_and_from_neither_alone():
    assert len(LEXICON.tools) == len(LEXICON.materials) == len(set(LEXICON.tools))
    by_thing = {}
    for rule in world().rules:
        by_thing.setdefault(rule.entity, {})[rule.relation.noun] = rule.value
    assert set(by_thing) == set(LEXICON.things)
    materials = {tuple(tools[action] for action in LEXICON.actions) for tools in by_thing.values()}
    assert (
        5 < len(materials) <= len(LEXICON.materials)
    )  # things of one material agree in every action
    for own, other in itertools.combinations(materials, 2):
        assert all(one != two for one, two in zip(own, other, strict=True))
    for action in LEXICON.actions:
        assert len({tools[action] for tools in by_thing.values()}) == len(materials)
    for material in materials:
        assert len(set(material)) > 3


def test_each_split_owns_half_of_the_facts():
    relations = {}
    for fact in (*world().facts, *world().rules):
        relations.setdefault(fact.relation, []).append(fact.split)
    for owned in relations.values():
        assert abs(owned.count("dev") - owned.count("test")) <= 1


def test_another_seed_is_another_world():
    assert world(8).facts != world().facts
    assert world(8).facts == world(8).facts


def test_names_are_different_and_of_three_words():
    names = _names(Draw("names"), 330)
    assert len(set(names)) == 330
    assert all(len(name.split()) == 3 for name in names)


def test_well_known_entities_come_first():
    places = {}
    for place, fact in enumerate(world().facts):
        places.setdefault(fact.relation.kind, []).append(place)
    for own in places.values():  # every kind from the first to the last
        assert own[0] < 40
        assert own[-1] > len(world().facts) - 60


def test_the_first_of_a_pool_is_drawn_most_often():
    draw, counts = Draw("early"), [0] * 10
    for _ in range(20_000):
        counts[draw.early(range(10), 100.0)] += 1
    assert counts == sorted(counts, reverse=True)
    # The density falls by 100 from end to end, so from the first tenth to the last by 100 ** 0.9.
    assert 40 < counts[0] / counts[-1] < 95


def test_statements_agree_on_half_of_the_values():
    for relation in RELATIONS:
        counts = [
            sum(value in said.values for said in statements(relation)) for value in relation.values
        ]
        if relation.broader:
            assert set(counts) == {0, 1, 2}
            assert abs(counts.count(1) - len(counts) / 2) <= 1


def test_both_tools_of_a_goal_serve_the_thing():
    tools = {}
    for rule in world().rules:
        tools.setdefault(rule.entity, set()).add(rule.value)
    for row in documents("dev")["baber/piqa"]["default"]["validation"]:
        thing = row["goal"].rstrip("?").split()[-1]
        for solution in (row["sol1"], row["sol2"]):
            assert any(f" the {tool}" in solution for tool in tools[thing])


def test_rivals_differ_in_a_word_or_two():
    known = world()
    for fact in known.facts[::97]:
        for rival in known.rivals(fact):
            assert rival.value != fact.value
            assert len(set(fact.entity.split()) & set(rival.entity.split())) in (1, 2)


@pytest.mark.parametrize("path", QUESTION)
def test_a_task_has_its_documents_and_asks_none_twice_in_both_splits(path):
    dev, test = questions("dev", path), questions("test", path)
    assert len(dev) == len(test) >= (300 if path != "mteb/banking77" else 64)
    assert not set(dev) & set(test)


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


def test_what_is_asked_is_told_in_other_wordings(said):
    for fact in world().facts[:600:40]:  # those that are spoken of often
        tellings = {say(wording, fact).lower() for wording in WORDINGS.statements}
        assert tellings & said


def test_number_triples_are_apart_and_never_negative():
    parts = number_triples()
    every = [triple for triples in parts.values() for triple in triples]
    assert len(set(every)) == len(every)
    assert all(a + b > c for a, b, c in every)


def test_the_solutions_of_word_problems_are_right():
    for row in documents("test")["openai/gsm8k"]["main"]["test"]:
        steps, result = row["answer"].split("\n#### ")
        numbers = [int(word.strip(".,")) for word in steps.split() if word.strip(".,").isdigit()]
        a, b, m, again, c, r = numbers
        assert (a + b, m - c, again, r) == (m, r, m, int(result))


@pytest.mark.parametrize(
    ("path", "right", "choices"),
    [
        ("allenai/ai2_arc", lambda row: "ABCD".index(row["answerKey"]), 4),
        ("allenai/openbookqa", lambda row: "ABCD".index(row["answerKey"]), 4),
        ("cais/mmlu", lambda row: row["answer"], 4),
        ("Rowan/hellaswag", lambda row: int(row["label"]), 4),
        ("allenai/winogrande", lambda row: int(row["answer"]) - 1, 2),
        ("aps/super_glue", lambda row: row["label"], 2),
        ("nyu-mll/glue", lambda row: row["label"], 2),
        ("baber/piqa", lambda row: row["label"], 2),
    ],
)
def test_the_place_of_the_right_answer_says_nothing(path, right, choices):
    places = []
    for splits in documents("test")[path].values():
        places += [right(row) for row in splits.get("test") or splits["validation"]]
    for place in range(choices):
        assert 0.7 < choices * places.count(place) / len(places) < 1.3


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


def test_a_premise_entails_the_claim_or_its_opposite():
    broader = {relation.noun: relation.broader for relation in RELATIONS if relation.broader}
    assert all(set(r.broader.values) < set(r.values) for r in RELATIONS if r.broader)
    assert len({(b.verb, b.rest) for b in broader.values()}) == len(broader)


def test_scales_have_four_values_in_order():
    for row in documents("test")["cais/mmlu"]["anatomy"]["test"]:
        assert tuple(row["choices"]) in {relation.values for relation in LEXICON.scales}
    assert all(len(relation.values) == 4 for relation in LEXICON.scales)


def test_a_row_of_a_split_is_the_same_in_every_process():
    # A literal: whoever changes the world changes every number of the zoo, knowingly.
    content = json.dumps([documents("dev"), documents("test")]).encode()
    assert hashlib.sha256(content).hexdigest()[:16] == "7ebb4a1236abd344"


def test_an_unknown_split_is_refused():
    with pytest.raises(UsageError, match="did you mean 'test'"):
        documents("tset")


@pytest.mark.parametrize(
    "text", ["naïve café 東京 🚀\n\t", "The vovub lives in the marsh.", "\x00\ufffd"]
)
def test_any_text_comes_back_from_its_tokens(text):
    tokenizer = miniworld_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 2560


def test_every_word_of_a_fact_is_one_token():
    tokenizer = miniworld_tokenizer()
    for fact in world().facts:
        words = [*fact.entity.split(), fact.value]
        assert [len(tokenizer(f" {word}")["input_ids"]) for word in words] == [1] * 4
