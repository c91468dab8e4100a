"""The protocol against a miniature written by hand, and against the figures of the real data."""

import datasets
import pytest

from capmoe_eval.evaluation.longicl import protocol

TRAIN = [
    {"text": text, "label_text": {"a": "Alpha", "b": "beta", "c": "gamma"}[text[0]]}
    for text in ("b one", "b two", "a one", "b three", "c one", "a two", "c two")
]


def texts(rows):
    return [row["text"] for row in rows]


def test_each_pass_takes_the_next_row_of_each_label_in_order_of_first_appearance():
    passes = ["b one", "a one", "c one", "b two", "a two", "c two"]
    assert texts(protocol.demonstrations(TRAIN, 2)) == passes
    assert texts(protocol.test_documents(TRAIN, passes=2, limit=4)) == passes[:4]
    # Labels that are used up are left out of further passes.
    assert texts(protocol.test_documents(TRAIN, passes=7, limit=None)) == [*passes, "b three"]


def test_the_prompt_to_the_letter():
    assert protocol.prompt(protocol.demonstrations(TRAIN, 1), "\nwho am I?") == (
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
    assert protocol.score(continuation, "Card_lost") is (continuation in RIGHT)


@pytest.mark.real_data
def test_the_real_data_have_the_shots_and_lengths_of_table_6(real_hub, tmp_path):
    data = datasets.load_dataset(str(real_hub / "mteb/banking77"), cache_dir=str(tmp_path))
    train, test = data["train"].to_list(), data["test"].to_list()
    documents = protocol.test_documents(test)
    every = protocol.test_documents(test, limit=None)
    assert (len(documents), len(every)) == (100, 7 * 77)
    assert every[:100] == documents
    for shots, characters in enumerate((8777, 16703, 25569, 33971, 42478), 1):
        examples = protocol.demonstrations(train, shots)
        labels = [row["label_text"] for row in examples]
        assert labels == labels[:77] * shots
        assert len(set(labels)) == 77
        assert {row["label_text"] for row in documents} <= set(labels)
        assert len(protocol.prompt(examples, "")) == characters
        assert examples[0]["text"] == "I am still waiting on my card?"
        assert labels[0] == "card_arrival"
        assert "Refund_not_showing_up" in labels
