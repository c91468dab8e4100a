"""Dev documents are those of which no step of a training has read a token."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from capmoe_zoo.dev import read_documents
from capmoe_zoo.text import windows
from capmoe_zoo.train import Recipe, batch_at, fit_rows, load_recipe


class Words:
    """A tokenizer whose tokens are numbers."""

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def test_a_document_is_read_with_any_window_that_has_a_token_of_it() -> None:
    recipe: Recipe = dataclasses.replace(
        load_recipe("smollm2_moe"), window=8, batch=2, fit_windows=2
    )
    rng = np.random.default_rng(0)
    # Every token is one document's alone, so that windows say which documents they hold.
    numbers = iter(range(1, 10_000))
    documents = [
        " ".join(str(next(numbers)) for _ in range(size)) for size in rng.integers(1, 20, 60)
    ]
    of_token = {int(word): text for text in documents for word in text.split()}
    windows_NT = windows(documents, Words(), recipe.window)
    for steps in (0, 3, 12):
        batches = [batch_at(windows_NT, step, recipe) for step in range(steps)]
        seen_NT = np.concatenate([windows_NT[fit_rows(len(windows_NT), recipe)], *batches])
        seen = {of_token[token] for token in seen_NT.ravel().tolist() if token}
        read = read_documents(documents, Words(), recipe, steps)
        assert seen <= read
        # A separator alone does not tell whose it is: such a document counts as read, too.
        assert len(read - seen) <= len(seen_NT)
        assert read < set(documents)
