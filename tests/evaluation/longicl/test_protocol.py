"""The protocol against a miniature written by hand, and against the figures of the real data."""

import datasets
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment import longicl as protocol


def row(text, label):
    return {"text": text, "label_text": label}


TRAIN = [
    row("b one", "beta"),
    row("b two", "beta"),
    row("a one", "Alpha"),
    row("b three", "beta"),
    row("c one", "gamma"),
    row("a two", "Alpha"),
    row("c two", "gamma"),
]


def test_each_pass_takes_the_next_row_of_each_label_in_order_of_first_appearance():
    shown = protocol.demonstrations(TRAIN, 2)
    assert [shot["text"] for shot in shown] == [
        "b one",
        "a one",
        "c one",
        "b two",
        "a two",
        "c two",
    ]


def test_more_shots_than_rows_are_refused_by_name():
    with pytest.raises(UsageError, match=r"shots=3: label 'Alpha' has only 2 train rows"):
        protocol.demonstrations(TRAIN, 3)


@pytest.mark.parametrize("shots", [0, -1])
def test_a_prompt_needs_demonstrations(shots):
    with pytest.raises(UsageError, match=f"shots={shots}"):
        protocol.demonstrations(TRAIN, shots)


def test_test_documents_are_cut_to_the_limit():
    texts = [shot["text"] for shot in protocol.test_documents(TRAIN, passes=2, limit=4)]
    assert texts == ["b one", "a one", "c one", "b two"]


def test_labels_that_are_used_up_are_left_out_of_further_passes():
    texts = [shot["text"] for shot in protocol.test_documents(TRAIN, passes=7, limit=None)]
    assert texts == ["b one", "a one", "c one", "b two", "a two", "c two", "b three"]


def test_the_prompt_to_the_letter():
    assert protocol.prompt(protocol.demonstrations(TRAIN, 1), "\nwho am I?") == (
        "Given a customer service query, please predict the intent of the query. The predict "
        "answer must come from the demonstration examples with the exact format. The examples "
        "are as follows: \n"
        "service query: b one\n"
        "intent category: beta\n"
        "service query: a one\n"
        "intent category: Alpha\n"
        "service query: c one\n"
        "intent category: gamma\n"
        "service query: \n"
        "who am I?\n"
        "intent category: "
    )


@pytest.mark.parametrize(
    ("continuation", "right"),
    [
        ("card_lost", True),
        (" card_lost \n", True),
        ("CARD_lost\nservice query: and so on", True),
        ("card_lostservice query: and so on", True),
        ("\n\n card_lost\nmore", True),
        ("card_lost service query card_lost", True),
        ("", False),
        ("card_lost.", False),
        ("the intent is card_lost", False),
        ("card lost", False),
        ("other\ncard_lost", False),
        ("service query: card_lost", False),
        ("\nservice query\ncard_lost", False),
    ],
)
def test_scoring(continuation, right):
    assert protocol.score(continuation, "Card_lost") is right


@pytest.fixture(scope="module")
def rows(real_hub, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("real"))
    data = datasets.load_dataset(str(real_hub / "mteb/banking77"), cache_dir=cache)
    return {split: data[split].to_list() for split in ("train", "test")}


@pytest.mark.real_data
class TestRealData:
    @pytest.mark.parametrize(
        ("shots", "characters"), [(1, 8777), (2, 16703), (3, 25569), (4, 33971), (5, 42478)]
    )
    def test_shots_and_lengths(self, rows, shots, characters):
        shown = protocol.demonstrations(rows["train"], shots)
        assert len(shown) == 77 * shots
        labels = [demonstration["label_text"] for demonstration in shown]
        assert labels == labels[:77] * shots
        assert len(set(labels)) == 77
        documents = protocol.test_documents(rows["test"])
        assert {document["label_text"] for document in documents} <= set(labels)
        assert len(protocol.prompt(shown, "")) == characters

    def test_one_hundred_documents_of_539(self, rows):
        documents = protocol.test_documents(rows["test"])
        assert len(documents) == 100
        every = protocol.test_documents(rows["test"], limit=None)
        assert len(every) == 7 * 77
        assert every[:100] == documents

    def test_the_first_demonstration_and_the_odd_label(self, rows):
        shown = protocol.demonstrations(rows["train"], 1)
        assert (shown[0]["text"], shown[0]["label_text"]) == (
            "I am still waiting on my card?",
            "card_arrival",
        )
        assert "Refund_not_showing_up" in {shot["label_text"] for shot in shown}
