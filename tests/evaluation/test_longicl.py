"""The protocol against a miniature written by hand; lm-eval's tasks have its prompts and scores."""

from pathlib import Path

import datasets
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from capmoe_eval.evaluation.longicl import protocol as longicl
from tests.evaluation.answering import Answering

TRAIN = [
    {"text": text, "label_text": {"a": "Alpha", "b": "beta", "c": "gamma"}[text[0]]}
    for text in ("b one", "b two", "a one", "b three", "c one", "a two", "c two")
]


def texts(rows):
    return [row["text"] for row in rows]


def test_each_pass_takes_the_next_row_of_each_label_in_order_of_first_appearance():
    passes = ["b one", "a one", "c one", "b two", "a two", "c two"]
    assert texts(longicl.demonstrations(TRAIN, 2)) == passes
    assert texts(longicl.test_documents(TRAIN, passes=2, limit=4)) == passes[:4]
    # Labels that are used up are left out of further passes.
    assert texts(longicl.test_documents(TRAIN, passes=7, limit=None)) == [*passes, "b three"]


def test_the_prompt_to_the_letter():
    assert longicl.prompt(longicl.demonstrations(TRAIN, 1), "\nwho am I?") == (
        "Given a customer service query, please predict the intent of the query. The predict "
        "answer must come from the demonstration examples with the exact format. The examples "
        "are as follows: \n"
        "service query: b one\nintent category: beta\n"
        "service query: a one\nintent category: Alpha\n"
        "service query: c one\nintent category: gamma\n"
        "service query: \nwho am I?\nintent category: "
    )


RIGHT = [
    "card_lost",
    " card_lost \n",
    "CARD_lost\nservice query: and so on",
    "card_lostservice query: and so on",
    "\n\n card_lost\nmore",
    "card_lost service query card_lost",
]
WRONG = [
    "",
    "card_lost.",
    "the intent is card_lost",
    "card lost",
    "other\ncard_lost",
    "service query: card_lost",
    "\nservice query\ncard_lost",
]


@pytest.mark.parametrize("continuation", [*RIGHT, *WRONG])
def test_scoring(continuation):
    assert longicl.score(continuation, "Card_lost") is (continuation in RIGHT)


@pytest.mark.real_data
def test_the_real_data_have_the_shots_and_lengths_of_table_6(real_hub, tmp_path):
    data = datasets.load_dataset(str(real_hub / "mteb/banking77"), cache_dir=str(tmp_path))
    train, test = data["train"].to_list(), data["test"].to_list()
    documents = longicl.test_documents(test)
    every = longicl.test_documents(test, limit=None)
    assert (len(documents), len(every)) == (100, 7 * 77)
    assert every[:100] == documents
    for shots, characters in enumerate((8777, 16703, 25569, 33971, 42478), 1):
        examples = longicl.demonstrations(train, shots)
        labels = [row["label_text"] for row in examples]
        assert labels == labels[:77] * shots
        assert len(set(labels)) == 77
        assert {row["label_text"] for row in documents} <= set(labels)
        assert len(longicl.prompt(examples, "")) == characters
        assert examples[0]["text"] == "I am still waiting on my card?"
        assert labels[0] == "card_arrival"
        assert "Refund_not_showing_up" in labels


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=Path(longicl.__file__).parent, include_defaults=False)


@pytest.fixture(scope="module")
def rows(hub, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("rows"))
    data = datasets.load_dataset(str(hub / "mteb/banking77"), cache_dir=cache)
    return {split: data[split].to_list() for split in ("train", "test")}


def evaluate(manager, root, lm, *shots, **keywords):
    """Return the results of the tasks of these numbers of shots."""
    names = [f"longicl_banking77_{each}shot" for each in shots]
    configs = [load_yaml(manager.task_index[name].yaml_path) for name in names]
    for config in configs:
        config["dataset_path"] = str(root / config["dataset_path"])
    result = simple_evaluate(model=lm, tasks=configs, task_manager=manager, **keywords)
    return [result["results"][name] for name in names]


def test_prompts_are_those_of_the_protocol(manager, hub, rows):
    lm = Answering(lambda doc: "")
    # A number of shots from outside must not add lm-eval's own demonstrations.
    evaluate(manager, hub, lm, *range(1, 6), num_fewshot=3)
    documents = longicl.test_documents(rows["test"])
    prompts, settings = zip(*lm.requests, strict=True)
    assert list(prompts) == [
        longicl.prompt(longicl.demonstrations(rows["train"], shots), doc["text"])
        for shots in range(1, 6)
        for doc in documents
    ]
    greedy = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 100}
    assert all(of == {"until": [longicl.NEXT_QUERY], **greedy} for of in settings)


def test_a_mixture_of_answers_scores_its_mean(manager, hub, rows):
    labels = {row["text"]: row["label_text"] for row in rows["test"]}
    documents = longicl.test_documents(rows["test"])
    right = {row["text"] for row in documents[:4]}

    def answer(doc):
        return f"\n {labels[doc['text']].upper()}\nmore" if doc["text"] in right else "none"

    (result,) = evaluate(manager, hub, Answering(answer), 1)
    share, n = 4 / len(documents), len(documents)
    assert result["exact_match,none"] == share
    assert result["exact_match_stderr,none"] == pytest.approx(
        (share * (1 - share) / (n - 1)) ** 0.5
    )
