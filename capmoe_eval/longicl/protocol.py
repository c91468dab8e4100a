r"""The protocol of Table 6: LongICLBench's BANKING77 (Li et al., 2024), as pure functions.

A prompt shows R customer queries of each of the 77 intents with the intent's name, then a query
without one; the model writes the name. Nothing is random. The reference is ``banking77_infer.py``
of LongICLBench; the paper differs only in taking 100 test documents instead of 500.

A row is a mapping with ``text``, the query, and ``label_text``, the name of its intent. The
functions hold for any set of labels. Labels are told apart by name: their numbers differ between
published copies of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from capmoe_eval.errors import UsageError

INSTRUCTION = (
    "Given a customer service query, please predict the intent of the query. "
    "The predict answer must come from the demonstration examples with the exact format."
)
#: What a continuation goes on with after its answer; nothing after it is scored.
NEXT_QUERY = "service query"

_Row = TypeVar("_Row", bound=Mapping[str, object])


def demonstrations(rows: Iterable[_Row], shots: int) -> list[_Row]:
    """Return the demonstrations of a prompt: ``shots`` rows of each label.

    LongICLBench's ``select_data``: ``shots`` passes over the labels, which stand in the order of
    their first appearance in ``rows``; each pass takes the next unused row of each label.

    Args:
        rows: The train split.
        shots: R, the number of demonstrations of each label.

    Returns:
        Number of labels times ``shots`` rows, pass by pass.

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
    """Return the test documents: those of :func:`demonstrations`' procedure, cut to ``limit``.

    Args:
        rows: The test split. A label whose rows are used up is left out of further passes; each
            label of BANKING77 has 40, so this concerns smaller data only.
        passes: Passes over the labels; 7 in LongICLBench, which gives 539 rows.
        limit: The first so many are evaluated: 100 in the paper, 500 in LongICLBench, all if None.
    """
    return _passes(_by_label(rows), passes)[:limit]


def prompt(demonstrations: Iterable[Mapping[str, object]], text: str) -> str:
    r"""Return the prompt for the query ``text``; it ends in ``intent category: `` with the space.

    Queries are taken as they are: a few of BANKING77's begin or end in newlines.

    Args:
        demonstrations: Rows from :func:`demonstrations`.
        text: The query whose intent is asked for.
    """
    shown = "".join(
        f"service query: {row['text']}\nintent category: {row['label_text']}\n"
        for row in demonstrations
    )
    question = f"service query: {text}\nintent category: "
    return f"{INSTRUCTION} The examples are as follows: \n{shown}{question}"


def score(continuation: str, label: str) -> bool:
    """Return whether the model's continuation of a prompt names the label.

    What stands before the next ``service query`` counts, of that the first line, stripped; letters
    are compared without case. As in LongICLBench, blank lines before the answer are passed over.

    Args:
        continuation: What the model wrote after the prompt.
        label: The name of the right intent.
    """
    answer = continuation.split(NEXT_QUERY, maxsplit=1)[0].strip()
    first_line = answer.split("\n", maxsplit=1)[0].strip()
    return first_line.lower() == label.lower()


def _by_label(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    """Group rows by label; labels stand in the order of their first appearance."""
    by_label: dict[str, list[_Row]] = {}
    for row in rows:
        by_label.setdefault(str(row["label_text"]), []).append(row)
    return by_label


def _passes(by_label: Mapping[str, Sequence[_Row]], count: int) -> list[_Row]:
    return [
        members[index]
        for index in range(count)
        for members in by_label.values()
        if index < len(members)
    ]
