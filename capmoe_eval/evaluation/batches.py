"""Deal requests into batches, and tell which documents and positions a batch is of."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from capmoe_eval.errors import UsageError

Document = tuple[str | None, int | None]  # name of the task, lm-eval's id of the document

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Takes what is counted, such as ``requests``, how many are done, and of how many."""

_FEW_ROWS = 16
"""Rows below which a processor may multiply matrices in another way than more, with other bits."""


def documents(requests: Any) -> list[Document]:
    """Return the document of each request."""
    return [(request.task_name, request.doc_id) for request in requests]


def note_truncated(
    truncated: dict[Document, int], documents: Iterable[Document], sizes: Iterable[int], most: int
) -> None:
    """Add to the most tokens that each document loses those of requests of more than ``most``."""
    for document, size in zip(documents, sizes, strict=False):
        if size > most:
            truncated[document] = max(size - most, truncated.get(document, 0))


def unscorable(document: Document, tokens: int, most: int) -> UsageError:
    """Return the error for a choice or target of which there is no log-likelihood."""
    task, number = document
    what = (
        f"of {tokens} tokens, and the model takes {most}; choose a model, or a max_length, that "
        "takes more"
        if tokens
        else "without a token, of which there is no log-likelihood; change the task's "
        "doc_to_choice or doc_to_target"
    )
    return UsageError(f"task={task}: document {number} has a choice or target {what}")


def deal(keys: Sequence[Hashable], size: int, seed: int) -> list[list[int]]:
    """Return random batches of ``size`` rows, each with the indices of its requests.

    Requests with equal keys share one row. Equal seeds deal equal keys equally. lm-eval sorts
    requests by length instead: a batch, and with it a capacity, has questions of one length.
    """
    rows: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    draw = random.Random(seed).random  # the only method whose sequence Python keeps stable
    order = sorted(rows.values(), key=lambda _: draw())
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [[index for row in batch for index in row] for batch in batches]


def n_scored(lengths: Sequence[int], continuations: Sequence[int]) -> int:
    """Return the number of last positions of a right-padded batch that contain all scored ones.

    ``lengths`` are the tokens of the sequences, ``continuations`` those of their ends that are
    scored. At least :data:`_FEW_ROWS` positions are taken, as far as there are so many.
    """
    first = min(map(int.__sub__, lengths, continuations))
    return min(max(lengths), max(max(lengths) - first, _FEW_ROWS))
