"""MTS-Dialog is asked as its file says, and scored as ROUGE and BERTScore are defined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from capmoe_eval.evaluation.generation.mts_dialog import (
    METRICS,
    BertScore,
    MtsDialog,
)
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.zoo.hub import ready
from tests.evaluation.answering import Answering

NAME = "capmoe_mts_dialog"


def built(root: str, name: str | None = None) -> MtsDialog:
    task = TaskLibrary().get(NAME, ready(data_source(root, name)))["tasks"][NAME]
    assert isinstance(task, MtsDialog)
    return task


def evaluated(task: MtsDialog, answer: Any, limit: int | None = None) -> tuple[Answering, Any]:
    model = Answering(answer)
    tasks = {"tasks": {NAME: task}, "groups": {}}
    return model, lm_eval.evaluator.evaluate(lm=model, task_dict=tasks, limit=limit)


@pytest.mark.real_data
def test_the_real_set_is_asked_for_the_note_of_a_dialogue(real_hub: Path) -> None:
    task = built(str(real_hub), "real")
    model, _ = evaluated(task, lambda doc: "", limit=2)
    assert len(task.eval_docs) == 200
    first = task.eval_docs[0]
    prompt, arguments = model.requests[0]
    assert prompt == f"{first['dialogue']}\nNote:"
    assert (arguments["until"], arguments["max_gen_toks"]) == (["\n\n"], 256)
    assert task.doc_to_target(first) == first["section_text"]


WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "is", "of", "size", "old", ".", ","]
LAYER = 2


@pytest.fixture(scope="module", name="encoder")
def random_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights, large enough that words differ."""
    pytest.importorskip("bert_score", reason="needs pip install 'capmoe-eval[bertscore]'")
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


def test_bertscore_is_that_of_its_package(encoder: Path) -> None:
    import bert_score

    pairs = [
        ("the cat sat on the mat .", "a dog is old"),
        ("a dog", "the old dog of size , on a mat"),
        ("the cat sat", "the cat sat"),
    ]
    references, answers = map(list, zip(*pairs, strict=True))
    expected = torch.stack(bert_score.score(answers, references, str(encoder), num_layers=LAYER))
    score = BertScore(str(encoder), LAYER, rescale=False).score
    scores = [list(score(*pair).values()) for pair in pairs]
    assert list(score(*pairs[0])) == [f"bertscore_{n}" for n in ("precision", "recall", "f1")]
    precision, recall, _ = scores[1]
    assert precision != recall
    assert scores == [pytest.approx(row, abs=1e-5) for row in expected.T.tolist()]


def test_an_empty_answer_scores_none_and_all_is_recorded(encoder: Path) -> None:
    score = BertScore(str(encoder), LAYER, rescale=False)
    assert score.score("the cat", " ") == dict.fromkeys(METRICS, 0.0)
    identity = score.identity()
    expected = {"encoder": str(encoder), "layer": LAYER, "rescale": False}
    assert {name: identity[name] for name in expected} == expected
    assert len(identity["weights"]) == 16
    assert identity["bert-score"]
