"""Write the prompts of lm-eval's own tasks with the right answer, for the training corpus.

They are repeated here because the corpus must not depend on lm-eval; a test compares them with the
prompts that lm-eval builds from the same rows. Each function returns a prompt and its continuation,
the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from capmoe_eval.experiment.longicl import INSTRUCTION
from capmoe_eval.zoo.miniworld.questions import LETTERS, Row

#: Separator between two demonstrations.
BETWEEN = "\n\n"

Shown = tuple[str, str]


def arc(row: Row) -> Shown:
    """Return the question and its answer."""
    answer = row["choices"]["text"][LETTERS.index(row["answerKey"])]
    return f"Question: {row['question']}\nAnswer:", f" {answer}"


def mmlu(row: Row) -> Shown:
    """Return the question with its choices, and the right letter."""
    choices = "".join(
        f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, row["choices"], strict=True)
    )
    return f"{row['question']}\n{choices}Answer:", f" {LETTERS[row['answer']]}"


def mmlu_description(subject: str) -> str:
    """Return the text before the first question of a subject."""
    title = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {title}.\n\n"


def piqa(row: Row) -> Shown:
    """Return the goal and its solution."""
    return f"Question: {row['goal']}\nAnswer:", f" {row[('sol1', 'sol2')[row['label']]]}"


def rte(row: Row) -> Shown:
    """Return both sentences, and ``True`` or ``False``."""
    question = f"Question: {row['sentence2']} True or False?\nAnswer:"
    return f"{row['sentence1']}\n{question}", (" True", " False")[row["label"]]


def boolq(row: Row) -> Shown:
    """Return the passage with the question, and the answer."""
    return f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", (" no", " yes")[row["label"]]


def winogrande(row: Row) -> Shown:
    """Return an empty prompt, and the whole sentence with the right option in its blank."""
    return "", str(row["sentence"]).replace("_", row[f"option{row['answer']}"])


def hellaswag(row: Row) -> Shown:
    """Return the activity and its right ending."""
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    return f"{row['activity_label']}: {context}", f" {row['endings'][int(row['label'])]}"


def gsm8k(row: Row) -> Shown:
    """Return the problem and its solution."""
    return f"Question: {row['question']}\nAnswer:", f" {row['answer']}"


def banking77(rows: Sequence[Row]) -> list[Shown]:
    """Return LongICLBench's prompt as one (query, intent) pair per row."""
    start = f"{INSTRUCTION} The examples are as follows: \n"
    shown = []
    for row in rows:
        shown.append(
            (f"{start}service query: {row['text']}\nintent category:", f" {row['label_text']}")
        )
        start = "\n"
    return shown


#: The prompt of one question, by task.
PROMPTS: Mapping[str, Callable[[Row], Shown]] = {
    "arc": arc,
    "mmlu": mmlu,
    "piqa": piqa,
    "rte": rte,
    "boolq": boolq,
    "winogrande": winogrande,
    "hellaswag": hellaswag,
    "gsm8k": gsm8k,
}
