"""The corpus shows questions exactly as lm-eval does, and batches hold what the corpus says."""

import pytest
import torch
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.zoo.hub import embedded_hub
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_zoo.embedded.batch import IGNORED
from capmoe_zoo.embedded.miniworld import Batches
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld.evaluation import documents
from capmoe_zoo.worlds.miniworld.world import world

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


@pytest.fixture(scope="module")
def batches():
    return Batches(world(), miniworld_tokenizer(), seed=1)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_positions_start_anew_where_a_document_does(batches, step):
    batch = batches[step]
    assert batch.input_ids_BS.shape == (Batches.long if step == 4 else Batches.short)
    tokenizer = miniworld_tokenizer()
    starts_BS = batch.position_ids_BS == 0
    before_BS = torch.roll(batch.input_ids_BS, 1, dims=1)
    pad = tokenizer.pad_token_id
    after_end_BS = (before_BS == tokenizer.eos_token_id) & (batch.input_ids_BS != pad)
    assert starts_BS[:, 0].all()
    assert torch.equal(starts_BS[:, 1:] & (batch.input_ids_BS[:, 1:] != pad), after_end_BS[:, 1:])
    learned_BS = batch.labels_BS != IGNORED
    assert torch.equal(batch.labels_BS[learned_BS], batch.input_ids_BS[learned_BS])
    assert not learned_BS[batch.input_ids_BS == pad].any()
    assert not learned_BS[starts_BS].any()
    assert learned_BS.any(dim=1).all()
