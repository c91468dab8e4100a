"""BERTScore on a random encoder is what a naive loop of its definition gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation.bertscore import METRICS, BertScore
from capmoe_eval.evaluation.generation.mts_dialog import MtsDialog
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.zoo.hub import ready

pytest.importorskip("bert_score", reason="BERTScore needs pip install 'capmoe-eval[bertscore]'")

WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "is", "of", "size", "old", ".", ","]
LAYER = 2


@pytest.fixture(scope="module", name="encoder")
def random_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights, large enough that words differ."""
    directory = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    tokenizer = BertTokenizerFast(vocab_file=str(directory / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(special) + len(WORDS),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(directory)
    return directory


def states(encoder: Path, text: str) -> torch.Tensor:
    """Hidden states of a text after ``LAYER`` layers [T, D], with [CLS] and [SEP] at the ends."""
    model = BertModel.from_pretrained(encoder).eval()
    tokenizer = BertTokenizerFast.from_pretrained(encoder)
    with torch.no_grad():
        found = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
    return found.hidden_states[LAYER][0]


def naive(encoder: Path, reference: str, answer: str) -> dict[str, float]:
    """Equations 1 to 3 of Zhang et al. (2020), token by token."""
    own, theirs = states(encoder, answer), states(encoder, reference)

    def best(token: torch.Tensor, others: torch.Tensor) -> float:
        return max(float(torch.cosine_similarity(token, other, dim=0)) for other in others)

    precision, recall = (
        sum(best(word, others) for word in words[1:-1]) / (len(words) - 2)
        for words, others in ((own, theirs), (theirs, own))
    )
    f1 = 2 * precision * recall / (precision + recall)
    return dict(zip(METRICS, (precision, recall, f1), strict=True))


PAIRS = [
    ("the cat sat on the mat .", "a dog is old"),
    ("a dog", "the old dog of size , on a mat"),
    ("the cat sat", "the cat sat"),
]


@pytest.mark.parametrize(("reference", "answer"), PAIRS)
def test_it_is_its_definition(encoder: Path, reference: str, answer: str) -> None:
    scores = BertScore(str(encoder), LAYER, rescale=False).score(reference, answer)
    assert scores == pytest.approx(naive(encoder, reference, answer), abs=1e-5)
    if reference != answer:
        assert scores["bertscore_f1"] < 0.97  # random words are not alike


def test_nothing_scores_none_and_all_is_recorded(encoder: Path) -> None:
    score = BertScore(str(encoder), LAYER, rescale=False)
    assert score.score("the cat", " ") == dict.fromkeys(METRICS, 0.0)
    found = score.identity()
    assert found["encoder"] == str(encoder) and found["layer"] == LAYER
    assert found["rescale"] is False and len(found["weights"]) == 16 and found["bert-score"]


def test_the_task_has_it_where_it_is_asked_for(encoder: Path) -> None:
    name = "capmoe_mts_dialog"
    task = TaskLibrary().get(name, ready(data_source("miniworld")))["tasks"][name]
    assert isinstance(task, MtsDialog)
    fields: dict[str, Any] = {"encoder": str(encoder), "layer": LAYER}
    asked = TaskId("mts_dialog", name, "har1/MTS", "bertscore_f1", **fields)
    document = {"section_text": "the cat sat on the mat ."}
    task.ask(asked)
    scores = task.process_results(document, [" a dog is old"])
    assert set(METRICS) < scores.keys() and "rougeL" in scores
    assert task.get_config("metadata")["bertscore"]["layer"] == LAYER
    task.ask(TaskId("mts_dialog", name, "har1/MTS", "rougeL"))
    assert not set(METRICS) & task.process_results(document, [" a dog is old"]).keys()
    assert task.get_config("metadata")["bertscore"] is None


@pytest.mark.parametrize(
    ("layer", "rescale", "line"),
    [
        (None, False, "layer=null: bert-score knows no layer for"),
        (9, False, "num_layers should be between 0 and 3"),
        (LAYER, True, "Baseline not Found"),
    ],
)
def test_what_it_lacks_is_said_in_one_line(
    encoder: Path, layer: int | None, rescale: bool, line: str
) -> None:
    with pytest.raises(UsageError, match=line) as found:
        BertScore(str(encoder), layer, rescale)
    assert "\n" not in str(found.value)
