"""BANKING77 of LongICLBench (Li et al., 2024) with 1 to 5 shots per label: Table 6, by lm-eval.

A prompt shows R customer queries of each of the 77 intents with the intent's name, then a query
without one; the model continues with the name. Nothing is random. The reference is
``banking77_infer.py`` of LongICLBench; the paper differs only in using 100 test documents, not 500.

A row is a mapping with ``text``, the query, and ``label_text``, the name of its intent: the numbers
of labels differ between published copies of the data. The functions work for any set of labels.
Models are trained on such prompts where neither lm-eval nor datasets is installed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from capmoe_eval.errors import UsageError

INSTRUCTION = (
    "Given a customer service query, please predict the intent of the query. "
    "The predict answer must come from the demonstration examples with the exact format."
)
#: What a prompt begins with.
INTRODUCTION = f"{INSTRUCTION} The examples are as follows: \n"
#: The words that follow the answer in a continuation; nothing after them is scored.
NEXT_QUERY = "service query"

_Row = TypeVar("_Row", bound=Mapping[str, object])


def demonstrations(rows: Iterable[_Row], shots: int) -> list[_Row]:
    """Return the demonstrations of a prompt: ``shots`` (R) rows of each label of the train split.

    As LongICLBench's ``select_data``, this makes ``shots`` passes over the labels in the order of
    their first appearance; each pass takes the next unused row of each label. Shots that are not
    positive, or more than a label has rows, are a UsageError.
    """
    if shots < 1:
        raise UsageError(f"shots={shots}: a prompt needs at least 1 demonstration of each label")
    rows = list(rows)
    for label, count in Counter(str(row["label_text"]) for row in rows).items():
        if count < shots:
            raise UsageError(f"shots={shots}: label {label!r} has only {count} train rows")
    return _passes(rows, shots)


def test_documents(rows: Iterable[_Row], passes: int = 7, limit: int | None = 100) -> list[_Row]:
    """Return the documents of the test split, chosen by passes as in :func:`demonstrations`.

    LongICLBench makes 7 passes, which gives 539 rows, and takes 500 of them, the paper 100; limit
    None is all. A label without unused rows is left out of further passes (BANKING77 has 40 each).
    """
    return _passes(rows, passes)[:limit]


def prompt(demonstrations: Iterable[Mapping[str, object]], text: str) -> str:
    r"""Return the prompt for the query ``text``; it ends in ``intent category: `` with the space.

    Queries are not stripped: a few of BANKING77's begin or end in newlines.
    """
    examples = "".join(
        f"{question(str(row['text']))}{row['label_text']}\n" for row in demonstrations
    )
    return f"{INTRODUCTION}{examples}{question(text)}"


def question(text: str) -> str:
    """Return a query with the words after it, which the name of its intent follows."""
    return f"service query: {text}\nintent category: "


def score(continuation: str, label: str) -> bool:
    """Return whether the model's continuation of a prompt names the label of the right intent.

    The answer is the first line, stripped, of the text before the next ``service query``; it is
    compared without regard to case. As in LongICLBench, blank lines before it are skipped.
    """
    answer = continuation.partition(NEXT_QUERY)[0].strip()
    return answer.partition("\n")[0].strip().lower() == label.lower()


def _passes(rows: Iterable[_Row], count: int) -> list[_Row]:
    """Return the first unused row of each label, ``count`` times."""
    by_label: dict[str, list[_Row]] = {}
    for row in rows:
        by_label.setdefault(str(row["label_text"]), []).append(row)
    return [group[i] for i in range(count) for group in by_label.values() if i < len(group)]
