"""The corpus shows questions as lm-eval does, whose prompts no digest of ours pins."""

from itertools import islice

import pytest
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.zoo.hub import embedded_hub

from capmoe_zoo.worlds.miniworld import questions

NAMES = {"arc": "arc_challenge", "mmlu": "mmlu_anatomy"}


@pytest.mark.parametrize(
    "task", ["arc", "boolq", "gsm8k", "hellaswag", "mmlu", "piqa", "rte", "winogrande"]
)
def test_a_question_reads_as_in_lm_eval(task):
    source = DataSource("miniworld", embedded_hub("miniworld", "dev"))
    (built,) = TaskLibrary().get(NAMES.get(task, task), source)["tasks"].values()
    for doc in islice(built.eval_docs, 12):
        context, target = built.doc_to_text(doc), built.doc_to_target(doc)
        if isinstance(target, int):
            target = built.doc_to_choice(doc)[target]
        if task == "winogrande":  # a choice is the beginning, with one of the options
            context = built.doc_to_choice(doc)[int(doc["answer"]) - 1]
        assert "".join(questions.prompt(task, doc)) == f"{context} {target}"
