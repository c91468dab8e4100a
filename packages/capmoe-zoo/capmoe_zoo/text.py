"""Split documents of train splits into training text and held-out text.

No document of a validation or test split is read for training. A training document that shares
thirteen words in a row with a validation or test document is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from capmoe_eval.evaluation.passages.text import is_held_out
from transformers import PreTrainedTokenizerBase

SEPARATOR = "<|endoftext|>"  # between documents, as in the pretraining of the base
OVERLAP_WORDS = 13


@dataclass(frozen=True)
class Source:
    """A train split, and how its rows become documents."""

    path: str  # directory below the root of the data
    document: Callable[[Any], str]
    held_out: int  # one document of ``held_out`` is held out, by its hash; 0 for none
    rows: int | None = None  # the first rows alone


def clean_hellaswag(text: str) -> str:
    """Return a text of HellaSwag without its markup, as lm-eval shows it."""
    return re.sub(r"\[.*?\]", "", text.replace(" [title]", ". ")).replace("  ", " ").strip()


def _hellaswag(row: Any) -> str:
    context = f"{row.activity_label}: {row.ctx_a} {row.ctx_b.capitalize()}"
    return f"{clean_hellaswag(context)} {clean_hellaswag(row.endings[int(row.label)])}"


def _piqa(row: Any) -> str:
    return f"Question: {row.goal}\nAnswer: {(row.sol1, row.sol2)[int(row.label)]}"


def _choice(question: str, row: Any) -> str:
    return f"{question} {row.choices['text'][list(row.choices['label']).index(row.answerKey)]}"


SOURCES = {
    "boolq": Source("aps/super_glue/boolq", lambda row: row.passage, held_out=8),
    "hellaswag": Source("Rowan/hellaswag/default", _hellaswag, held_out=2),
    "piqa": Source("baber/piqa/default", _piqa, held_out=4),
    "arc_challenge": Source(
        "allenai/ai2_arc/ARC-Challenge",
        lambda row: _choice(f"Question: {row.question}\nAnswer:", row),
        held_out=0,
    ),
    "openbookqa": Source(
        "allenai/openbookqa/main", lambda row: _choice(row.question_stem, row), held_out=0
    ),
    "winogrande": Source(
        "allenai/winogrande/winogrande_xl",
        lambda row: row.sentence.replace("_", row.option1 if row.answer == "1" else row.option2),
        held_out=0,
    ),
    "nq_open": Source(
        "google-research-datasets/nq_open/nq_open",
        lambda row: f"Question: {row.question}?\nAnswer: {row.answer[0]}",
        held_out=0,
    ),
    "gsm8k": Source(
        "openai/gsm8k/main",
        lambda row: f"Question: {row.question}\nAnswer: {re.sub(r'<<.*?>>', '', row.answer)}",
        held_out=0,
        rows=2000,  # a fifth of the text; arithmetic is not what is measured
    ),
    "clinical_notes": Source(
        "har1/MTS_Dialogue-Clinical_Note/default",
        lambda row: f"{row.dialogue}\n\n{row.section_text}".replace("\r\n", "\n"),
        held_out=0,
    ),
}
PASSAGES = "boolq"
"""The source on whose held-out documents perplexity is measured."""


def _spans(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    yield from (tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list | tuple | np.ndarray):
        yield from (text for item in value for text in _strings(item))


def evaluation_spans(root: Path) -> set[int]:
    """Return hashes of every thirteen words in a row of all validation and test splits."""
    spans: set[int] = set()
    for split in ("validation", "test"):
        for path in sorted(root.rglob(f"{split}.parquet")):
            for row in pd.read_parquet(path).itertuples(index=False):
                spans.update(hash(span) for text in _strings(tuple(row)) for span in _spans(text))
    return spans


def overlaps(document: str, spans: set[int]) -> bool:
    """Return whether a document has thirteen words in a row of :func:`evaluation_spans`."""
    return any(hash(span) in spans for span in _spans(document))


@dataclass(frozen=True)
class Text:
    """What training reads, and what measures it on the way."""

    train: list[str]
    held_out: list[str]  # passages; perplexity is measured on them
    left_out: int  # training documents that overlap with a validation or test document


def read_text(root: Path) -> Text:
    """Read the train splits below a root and divide them."""
    forbidden = evaluation_spans(root)
    train: list[str] = []
    held_out: list[str] = []
    left_out = 0
    for name, source in SOURCES.items():
        frame = pd.read_parquet(root / source.path / "train.parquet")[: source.rows]
        seen = set()
        for row in frame.itertuples(index=False):
            document = source.document(row)
            if document in seen:
                continue
            seen.add(document)
            if overlaps(document, forbidden):
                left_out += 1
            elif not is_held_out(document, source.held_out):
                train.append(document)
            elif name == PASSAGES:
                held_out.append(document)
    return Text(train, held_out, left_out)


def tokens(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the tokens of each document, and the separator after them."""
    separator = tokenizer.convert_tokens_to_ids(SEPARATOR)
    for encoded in tokenizer(list(documents), add_special_tokens=False)["input_ids"]:
        yield [*encoded, separator]


def windows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> np.ndarray:
    """Return the tokens of documents in windows [windows, length], separated, the rest cut off."""
    ids = [token for document in tokens(documents, tokenizer) for token in document]
    return np.array(ids[: len(ids) // length * length], dtype=np.uint16).reshape(-1, length)
