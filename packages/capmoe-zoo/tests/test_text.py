"""Which documents are trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from capmoe_eval.evaluation.passages.text import is_held_out

import capmoe_zoo.text
from capmoe_zoo.text import Source, read_text, windows

WORDS = [f"word{i}" for i in range(400)]


def write(root: Path, split: str, texts: list[str]) -> None:
    (root / "set").mkdir(exist_ok=True)
    # A choice is an array of strings in a dictionary, as in ARC.
    rows = [{"text": text, "choices": {"text": np.array([text])}} for text in texts]
    pd.DataFrame(rows).to_parquet(root / f"set/{split}.parquet")


def test_what_is_evaluated_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("set", lambda row: row.text, held_out=4)
    monkeypatch.setattr(capmoe_zoo.text, "SOURCES", {"passages": source})
    passages = [" ".join(WORDS[i : i + 20]) for i in range(0, 400, 20)]
    twelve = " ".join(WORDS[20:32])  # as many as two documents may have in common
    write(tmp_path, "train", [*passages, passages[7], passages[9].upper()])
    write(tmp_path, "validation", [f"before {' '.join(WORDS[5:18])}, after", f"{twelve} other"])
    write(tmp_path, "test", [passages[9]])
    text = read_text(tmp_path)
    assert text.left_out == 3  # one of validation, and one of test in two spellings
    assert sorted(text.train + text.held_out) == sorted({*passages} - {passages[0], passages[9]})
    assert text.held_out == [p for p in passages if is_held_out(p, 4) and p in text.held_out]
    assert 0 < len(text.held_out) < len(text.train)


class Letters:
    """A tokenizer whose tokens are letters."""

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {
            "input_ids": [
                [ord(c) - ord("a") + 1 if c.isalpha() else 27 for c in text] for text in texts
            ]
        }


def test_windows_separate_documents_and_cut_off_the_rest() -> None:
    assert windows(["ab", "cde"], Letters(), 3).tolist() == [[1, 2, 0], [3, 4, 5]]
