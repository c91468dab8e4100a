"""Write dev documents of real tasks: of train splits, those that a training did not read.

They lie in hub layout, in the place of the validation and test splits, so that ``data.root`` alone
makes an evaluation one of dev documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from capmoe_eval.experiment.files import whole_file, write_text
from transformers import PreTrainedTokenizerBase

from capmoe_zoo.text import SOURCES, evaluation_spans, overlaps, read_text, tokens
from capmoe_zoo.train import Recipe, fit_rows, order

TASKS = ("piqa", "openbookqa", "arc_challenge", "winogrande", "hellaswag")
COUNT = 500
"""Documents of each task."""


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

    They are the first :data:`COUNT` of each train split that no step has read and that share no
    thirteen words in a row with a validation or test document.
    """
    read = read_documents(read_text(data).train, tokenizer, recipe, steps)
    forbidden = evaluation_spans(data)
    counts = {}
    for task in TASKS:
        source = SOURCES[task]
        folder = data / source.path
        frame = pd.read_parquet(folder / "train.parquet")
        documents = [source.document(row) for row in frame.itertuples(index=False)]
        chosen = [
            place
            for place, document in enumerate(documents)
            if document not in read and not overlaps(document, forbidden)
        ]
        dev = frame.iloc[chosen[:COUNT]]
        for split in folder.glob("*.parquet"):
            with whole_file(out / source.path / split.name) as file:
                dev.to_parquet(file, index=False)
        dataset = Path(*Path(source.path).parts[:2])  # whose README names the files of its splits
        write_text(out / dataset / "README.md", (data / dataset / "README.md").read_text("utf-8"))
        counts[task] = len(dev)
    return counts
