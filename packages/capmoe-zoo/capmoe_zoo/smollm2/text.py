"""The text of the training, and dev documents, which it did not read.

No document of a validation or test split is read for training. A training document that shares
thirteen words in a row with a validation or test document is left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import torch
from capmoe_eval.evaluation.passages.task import is_held_out
from capmoe_eval.experiment.files import read_data, whole_file, write_text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from capmoe_zoo.smollm2.partition import Recipe

SEPARATOR = "<|endoftext|>"  # between documents, as in the pretraining of the base
OVERLAP_WORDS = 13
DEV_TASKS = ("piqa", "openbookqa", "arc_challenge", "winogrande", "hellaswag")
DEV_DOCUMENTS = 500
"""Documents of each of these tasks."""


def _clean(text: str) -> str:
    """Return a text of HellaSwag without its markup, as lm-eval shows it."""
    return re.sub(r"\[.*?\]", "", text.replace(" [title]", ". ")).replace("  ", " ").strip()


_ENVIRONMENT = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
_ENVIRONMENT.filters["clean"] = _clean
_ENVIRONMENT.filters["without_calculations"] = lambda text: re.sub(r"<<.*?>>", "", text)
SOURCES = read_data(__package__, "sources.yaml", dict[str, dict[str, Any]])
"""The train splits; the comments of ``sources.yaml`` say what each field is."""

PASSAGES = "boolq"
"""The source on whose held-out documents perplexity is measured."""


def _documents(source: Mapping[str, Any], frame: pd.DataFrame) -> list[str]:
    """Return the document of each row of a source."""
    template = _ENVIRONMENT.from_string(source["document"])
    return [template.render(row) for row in frame.to_dict("records")]


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
        frame = pd.read_parquet(root / source["path"] / "train.parquet")[: source.get("rows")]
        for document in dict.fromkeys(_documents(source, frame)):
            if not overlaps(document, forbidden):
                if not is_held_out(document, source.get("held_out", 0)):
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
        path = SOURCES[task]["path"]
        folder = data / path
        frame = pd.read_parquet(folder / "train.parquet")
        texts = _documents(SOURCES[task], frame)
        is_dev = [text not in read and not overlaps(text, forbidden) for text in texts]
        dev = frame[is_dev][:DEV_DOCUMENTS]
        for split in folder.glob("*.parquet"):
            with whole_file(out / path / split.name) as file:
                dev.to_parquet(file, index=False)
        dataset = Path(*Path(path).parts[:2])  # whose README names the files of its splits
        write_text(out / dataset / "README.md", (data / dataset / "README.md").read_text("utf-8"))
        counts[task] = len(dev)
    return counts
