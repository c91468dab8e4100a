"""The protocol of Table 6: BANKING77 of LongICLBench (Li et al., 2024).

A prompt shows R customer queries of each of the 77 intents with the intent's name, then a query
without one; the model continues with the name. Nothing is random. The reference is
``banking77_infer.py`` of LongICLBench; the paper differs only in using 100 test documents, not 500.

A row is a mapping with ``text``, the query, and ``label_text``, the name of its intent: the numbers
of labels differ between published copies of the data. The functions work for any set of labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from capmoe_eval.errors import UsageError

INSTRUCTION = (
    "Given a customer service query, please predict the intent of the query. "
    "The predict answer must come from the demonstration examples with the exact format."
)
#: The words that follow the answer in a continuation; nothing after them is scored.
NEXT_QUERY = "service query"

_Row = TypeVar("_Row", bound=Mapping[str, object])


def demonstrations(rows: Iterable[_Row], shots: int) -> list[_Row]:
    """Return the demonstrations of a prompt: ``shots`` (R) rows of each label of the train split.

    As LongICLBench's ``select_data``, this makes ``shots`` passes over the labels in the order of
    their first appearance in ``rows``; each pass takes the next unused row of each label.

    Raises:
        UsageError: If ``shots`` is not positive or a label has fewer rows.
    """
    if shots < 1:
        raise UsageError(f"shots={shots}: a prompt needs at least 1 demonstration of each label")
    by_label = _by_label(rows)
    for label, members in by_label.items():
        if len(members) < shots:
            raise UsageError(f"shots={shots}: label {label!r} has only {len(members)} train rows")
    return _passes(by_label, shots)


def test_documents(rows: Iterable[_Row], passes: int = 7, limit: int | None = 100) -> list[_Row]:
    """Return the test documents, chosen by passes as in :func:`demonstrations`.

    Args:
        rows: The test split. A label without unused rows is left out of further passes; this does
            not happen with BANKING77, which has 40 rows per label.
        passes: Number of passes over the labels; 7 in LongICLBench, which gives 539 rows.
        limit: Number of documents: 100 in the paper, 500 in LongICLBench; None for all.
    """
    return _passes(_by_label(rows), passes)[:limit]


def prompt(demonstrations: Iterable[Mapping[str, object]], text: str) -> str:
    r"""Return the prompt for the query ``text``; it ends in ``intent category: `` with the space.

    Queries are not stripped: a few of BANKING77's begin or end in newlines.
    """
    shown = "".join(
        f"service query: {row['text']}\nintent category: {row['label_text']}\n"
        for row in demonstrations
    )
    question = f"service query: {text}\nintent category: "
    return f"{INSTRUCTION} The examples are as follows: \n{shown}{question}"


def score(continuation: str, label: str) -> bool:
    """Return whether the model's continuation of a prompt names the label of the right intent.

    The answer is the first line, stripped, of the text before the next ``service query``; it is
    compared without regard to case. As in LongICLBench, blank lines before it are skipped.
    """
    answer = continuation.partition(NEXT_QUERY)[0].strip()
    return answer.partition("\n")[0].strip().lower() == label.lower()


def _by_label(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    by_label: dict[str, list[_Row]] = {}
    for row in rows:
        by_label.setdefault(str(row["label_text"]), []).append(row)
    return by_label


def _passes(by_label: Mapping[str, Sequence[_Row]], count: int) -> list[_Row]:
    """Return the first unused row of each label, ``count`` times."""
    taken = range(count)
    return [rows[i] for i in taken for rows in by_label.values() if i < len(rows)]
