"""The text of the training, and dev documents, which it did not read.

No document of a validation or test split is read for training. A training document that shares
thirteen words in a row with a validation or test document is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from capmoe_eval.evaluation.passages.task import is_held_out
from capmoe_eval.experiment.files import whole_file, write_text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from capmoe_zoo.smollm2.partition import Recipe

SEPARATOR = "<|endoftext|>"  # between documents, as in the pretraining of the base
OVERLAP_WORDS = 13
DEV_TASKS = ("piqa", "openbookqa", "arc_challenge", "winogrande", "hellaswag")
DEV_DOCUMENTS = 500
"""Documents of each of these tasks."""


class Source(NamedTuple):
    """A train split, and how its rows become documents."""

    path: str  # directory below the root of the data
    document: Callable[[Any], str]
    held_out: int = 0  # one document of ``held_out`` is held out, by its hash; 0 for none
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
    "boolq": Source("aps/super_glue/boolq", lambda row: row.passage, 8),
    "hellaswag": Source("Rowan/hellaswag/default", _hellaswag, 2),
    "piqa": Source("baber/piqa/default", _piqa, 4),
    "arc_challenge": Source(
        "allenai/ai2_arc/ARC-Challenge",
        lambda row: _choice(f"Question: {row.question}\nAnswer:", row),
    ),
    "openbookqa": Source("allenai/openbookqa/main", lambda row: _choice(row.question_stem, row)),
    "winogrande": Source(
        "allenai/winogrande/winogrande_xl",
        lambda row: row.sentence.replace("_", row.option1 if row.answer == "1" else row.option2),
    ),
    "nq_open": Source(
        "google-research-datasets/nq_open/nq_open",
        lambda row: f"Question: {row.question}?\nAnswer: {row.answer[0]}",
    ),
    "gsm8k": Source(
        "openai/gsm8k/main",
        lambda row: f"Question: {row.question}\nAnswer: {re.sub(r'<<.*?>>', '', row.answer)}",
        rows=2000,  # a fifth of the text; arithmetic is not what is measured
    ),
    "clinical_notes": Source(
        "har1/MTS_Dialogue-Clinical_Note/default",
        lambda row: f"{row.dialogue}\n\n{row.section_text}".replace("\r\n", "\n"),
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


def read_text(root: Path) -> tuple[list[str], list[str]]:
    """Return the documents below a root that are trained on, and the passages that are held out."""
    forbidden = evaluation_spans(root)
    train: list[str] = []
    held_out: list[str] = []
    for name, source in SOURCES.items():
        frame = pd.read_parquet(root / source.path / "train.parquet")[: source.rows]
        for document in dict.fromkeys(map(source.document, frame.itertuples(index=False))):
            if not overlaps(document, forbidden):
                if not is_held_out(document, source.held_out):
                    train.append(document)
                elif name == PASSAGES:
                    held_out.append(document)
    return train, held_out


def tokens(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the tokens of each document, and the separator after them."""
    separator = tokenizer.convert_tokens_to_ids(SEPARATOR)
    for encoded in tokenizer(list(documents), add_special_tokens=False)["input_ids"]:
        yield [*encoded, separator]


def windows(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Return the tokens of documents in windows [windows, length], separated, the rest cut off."""
    ids = [token for document in tokens(documents, tokenizer) for token in document]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def fit_rows(windows: int, recipe: Recipe) -> list[int]:
    """Return which of some windows the fit in closed form reads."""
    return [int(row) for row in np.linspace(0, windows - 1, recipe.fit_windows)]


def order(number: int, windows: int, recipe: Recipe) -> int:
    """Return which of some windows is read as the ``number``-th, from 0.

    All windows are read before any is read again, each time in an order of its own.
    """
    epoch, place = divmod(number, windows)
    return int(np.random.default_rng([recipe.seed, epoch]).permutation(windows)[place])


def read_documents(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, recipe: Recipe, steps: int
) -> set[str]:
    """Return the training documents of which a token is in a window that was read so far."""
    lengths = [len(ids) for ids in tokens(documents, tokenizer)]
    windows = sum(lengths) // recipe.window
    is_read = np.zeros(windows + 1, bool)  # the last stands for the rest that is cut off
    is_read[fit_rows(windows, recipe)] = True
    is_read[[order(number, windows, recipe) for number in range(steps * recipe.batch)]] = True
    ends = np.cumsum(lengths)
    spans = zip(ends - lengths, ends, documents, strict=True)
    return {
        document
        for first, end, document in spans
        if is_read[first // recipe.window : (end - 1) // recipe.window + 1].any()
    }


def write_dev(
    data: Path, out: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, steps: int
) -> dict[str, int]:
    """Write the dev documents of every task below ``out``; return their number by task.

    They lie in hub layout, in the place of the validation and test splits, so that ``data.root``
    alone makes an evaluation one of dev documents. They are the first :data:`DEV_DOCUMENTS` of each
    train split that no step has read and that share no thirteen words in a row with a validation or
    test document.
    """
    read = read_documents(read_text(data)[0], tokenizer, recipe, steps)
    forbidden = evaluation_spans(data)
    counts = {}
    for task in DEV_TASKS:
        source = SOURCES[task]
        folder = data / source.path
        frame = pd.read_parquet(folder / "train.parquet")
        documents = [source.document(row) for row in frame.itertuples(index=False)]
        chosen = [
            place
            for place, document in enumerate(documents)
            if document not in read and not overlaps(document, forbidden)
        ]
        dev = frame.iloc[chosen[:DEV_DOCUMENTS]]
        for split in folder.glob("*.parquet"):
            with whole_file(out / source.path / split.name) as file:
                dev.to_parquet(file, index=False)
        dataset = Path(*Path(source.path).parts[:2])  # whose README names the files of its splits
        write_text(out / dataset / "README.md", (data / dataset / "README.md").read_text("utf-8"))
        counts[task] = len(dev)
    return counts
