"""The corpus shows questions exactly as lm-eval does."""

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
    for place, row in zip(range(12), documents("dev")[path][config][split], strict=False):
        doc = list(built.eval_docs)[place]
        context = built.doc_to_text(doc)
        choices, target = (
            built.doc_to_choice(doc) if task != "gsm8k" else [],
            built.doc_to_target(doc),
        )
        if task == "winogrande":
            expected = f"{choices[int(row['answer']) - 1]} {target}"
        elif task == "gsm8k":
            expected = f"{context} {target}"
        else:
            right = target if isinstance(target, int) else choices.index(target)
            expected = f"{context} {choices[right]}"
        assert "".join(questions.prompt(task, row)) == expected


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
