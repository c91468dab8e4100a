"""The corpus shows questions as lm-eval does, whose prompts no digest of ours pins."""

from itertools import islice

import pytest
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.zoo.hub import embedded_hub

from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld.evaluation import documents

TASKS = {
    "arc": ("arc_challenge", "allenai/ai2_arc", "ARC-Challenge", "test"),
    "boolq": ("boolq", "aps/super_glue", "boolq", "validation"),
    "gsm8k": ("gsm8k", "openai/gsm8k", "main", "test"),
    "hellaswag": ("hellaswag", "Rowan/hellaswag", "default", "validation"),
    "mmlu": ("mmlu_anatomy", "cais/mmlu", "anatomy", "test"),
    "piqa": ("piqa", "baber/piqa", "default", "validation"),
    "rte": ("rte", "nyu-mll/glue", "rte", "validation"),
    "winogrande": ("winogrande", "allenai/winogrande", "winogrande_xl", "validation"),
}


@pytest.fixture(scope="module")
def library():
    return TaskLibrary(), DataSource("miniworld", embedded_hub("miniworld", "dev"))


@pytest.mark.parametrize("task", TASKS)
def test_a_question_reads_as_in_lm_eval(library, task):
    name, path, config, split = TASKS[task]
    tasks, source = library
    (built,) = tasks.get(name, source)["tasks"].values()
    rows = documents("dev")[path][config][split]
    for doc, row in zip(islice(built.eval_docs, 12), rows, strict=False):
        context, target = built.doc_to_text(doc), built.doc_to_target(doc)
        if isinstance(target, int):
            target = built.doc_to_choice(doc)[target]
        if task == "winogrande":  # a choice is the beginning, with one of the options
            context = built.doc_to_choice(doc)[int(row["answer"]) - 1]
        assert "".join(questions.prompt(task, row)) == f"{context} {target}"


def test_a_long_document_reads_as_a_prompt_with_shots(library):
    tasks, source = library
    (built,) = tasks.get("mmlu_anatomy", source)["tasks"].values()
    built.set_config(key="num_fewshot", value=5)
    prompt = built.fewshot_context(next(iter(built.eval_docs)), num_fewshot=5)
    rows = documents("dev")["cais/mmlu"]["anatomy"]
    shown = ["".join(questions.prompt("mmlu", row)) for row in rows["dev"]]
    asked = questions.prompt("mmlu", rows["test"][0])[0]
    title = questions.mmlu_description("anatomy")
    assert prompt == title + questions.BETWEEN.join([*shown, asked])
