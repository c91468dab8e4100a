"""lm-eval's own tasks run on the synthetic documents with nothing changed but ``dataset_path``."""

from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from capmoe_eval.zoo.synthetic.models import tiny_model
from capmoe_eval.zoo.synthetic.tokenizer import tiny_tokenizer

#: Task: its file, the shots of the paper's Table 5, and the metric reported.
TASKS = {
    "openbookqa": ("openbookqa/openbookqa.yaml", 0, "acc_norm,none"),
    "piqa": ("piqa/piqa.yaml", 0, "acc_norm,none"),
    "rte": ("glue/rte/default.yaml", 0, "acc,none"),
    "winogrande": ("winogrande/default.yaml", 5, "acc,none"),
    "boolq": ("super_glue/boolq/default.yaml", 0, "acc,none"),
    "arc_challenge": ("arc/arc_challenge.yaml", 25, "acc_norm,none"),
    "hellaswag": ("hellaswag/hellaswag.yaml", 10, "acc_norm,none"),
    "mmlu_world_religions": ("mmlu/default/mmlu_world_religions.yaml", 5, "acc,none"),
    "gsm8k": ("gsm8k/gsm8k.yaml", 5, "exact_match,flexible-extract"),
}


@pytest.fixture(scope="module")
def lm():
    tokenizer = tiny_tokenizer()
    model = tiny_model("olmoe", vocab_size=len(tokenizer))
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu")


@pytest.mark.parametrize("task", TASKS)
def test_the_task_evaluates(hub, lm, task):
    file, shots, metric = TASKS[task]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / file)
    config["dataset_path"] = str(hub / config["dataset_path"])
    config["num_fewshot"] = shots
    if config["output_type"] == "generate_until":
        config["generation_kwargs"]["max_gen_toks"] = 16
    result = simple_evaluate(
        model=lm,
        tasks=[config],
        task_manager=TaskManager(include_defaults=False),
        limit=2,
        bootstrap_iters=0,
    )
    samples = result["samples"][task]
    assert len({sample["doc_id"] for sample in samples}) == 2
    assert 0.0 <= result["results"][task][metric] <= 1.0
    contexts = [argument[0] for sample in samples for argument in sample["arguments"]]
    assert all(0 < len(lm.tok_encode(context)) < 1500 for context in contexts)
    if config["output_type"] == "multiple_choice":
        scores = [response[0] for sample in samples for response, *_ in sample["resps"]]
        assert len(set(scores)) == len(scores), "every answer has its own likelihood"
