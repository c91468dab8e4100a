"""Which documents are trained on, and which are dev documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from capmoe_eval.evaluation.passages.task import is_held_out

import capmoe_zoo.smollm2.text
from capmoe_zoo.smollm2.partition import Recipe
from capmoe_zoo.smollm2.text import fit_rows, order, read_documents, read_text, windows

WORDS = [f"word{i}" for i in range(400)]


def write(root: Path, split: str, texts: list[str]) -> None:
    (root / "set").mkdir(exist_ok=True)
    # A choice is an array of strings in a dictionary, as in ARC.
    rows = [{"text": text, "choices": {"text": np.array([text])}} for text in texts]
    pd.DataFrame(rows).to_parquet(root / f"set/{split}.parquet")


def test_what_is_evaluated_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"path": "set", "document": "{{text}}", "held_out": 4}
    monkeypatch.setattr(capmoe_zoo.smollm2.text, "SOURCES", {"boolq": source})
    passages = [" ".join(WORDS[i : i + 20]) for i in range(0, 400, 20)]
    twelve = " ".join(WORDS[20:32])  # as many as two documents may have in common
    write(tmp_path, "train", [*passages, passages[7], passages[9].upper()])
    write(tmp_path, "validation", [f"before {' '.join(WORDS[5:18])}, after", f"{twelve} other"])
    write(tmp_path, "test", [passages[9]])
    # One is in validation, and one, in two spellings, in test.
    allowed = [*passages[1:9], *passages[10:]]
    train, held_out = read_text(tmp_path)
    assert train == [passage for passage in allowed if not is_held_out(passage, 4)]
    assert held_out == [passage for passage in allowed if is_held_out(passage, 4)]
    assert 0 < len(held_out) < len(train)


class Words:
    """A tokenizer whose tokens are numbers."""

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def test_windows_separate_documents_and_cut_off_the_rest() -> None:
    assert windows(["1 2", "3 4 5"], Words(), 3).tolist() == [[1, 2, 0], [3, 4, 5]]


def test_a_document_is_read_with_any_window_that_has_a_token_of_it() -> None:
    recipe = Recipe(window=8, batch=2, fit_windows=2)
    rng = np.random.default_rng(0)
    # Every token is one document's alone, so that windows say which documents they hold.
    numbers = iter(range(1, 10_000))
    documents = [
        " ".join(str(next(numbers)) for _ in range(size)) for size in rng.integers(1, 20, 60)
    ]
    of_token = {int(word): text for text in documents for word in text.split()}
    windows_NT = windows(documents, Words(), recipe.window)
    for steps in (0, 3, 12):
        rows = [order(number, len(windows_NT), recipe) for number in range(2 * steps)]
        seen_NT = windows_NT[fit_rows(len(windows_NT), recipe) + rows]
        seen = {of_token[token] for token in seen_NT.ravel().tolist() if token}
        read = read_documents(documents, Words(), recipe, steps)
        assert seen <= read
        # A separator alone does not tell whose it is: such a document counts as read, too.
        assert len(read - seen) <= len(seen_NT)
        assert read < set(documents)
