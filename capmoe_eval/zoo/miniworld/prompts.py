"""Write the prompts of lm-eval's own tasks with the right answer, for the training corpus."""

from __future__ import annotations

import jinja2

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.longicl import INSTRUCTION
from capmoe_eval.zoo.synthetic.documents import Row

#: A prompt and its continuation, the answer.
Shown = tuple[str, str]

#: Separator between two demonstrations, where it is not a line break.
BETWEEN = "\n\n"
#: Text before the first of the open questions.
OPEN_DESCRIPTION = "Answer these questions:\n\n"
#: Text before the first query of LongICLBench.
BANKING77_DESCRIPTION = f"{INSTRUCTION} The examples are as follows: \n"

_ENVIRONMENT = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
_TEMPLATES = {
    task: [_ENVIRONMENT.from_string(text) for text in texts]
    for task, texts in read_data(__package__, "prompts.yaml", dict[str, tuple[str, str]]).items()
}


def prompt(task: str, row: Row) -> Shown:
    """Return the prompt of a row and its answer, by a task of ``prompts.yaml``."""
    asked, answer = _TEMPLATES[task]
    return asked.render(row), answer.render(row)


def mmlu_description(subject: str) -> str:
    """Return the text before the first question of a subject."""
    title = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {title}.\n\n"
