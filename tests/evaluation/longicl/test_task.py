"""The tasks give lm-eval the prompts of the protocol and score by it."""

from pathlib import Path

import datasets
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from capmoe_eval.evaluation import longicl
from capmoe_eval.evaluation.longicl import protocol
from tests.evaluation.answering import Answering

SHOTS = range(1, 6)


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=Path(longicl.__file__).parent, include_defaults=False)


@pytest.fixture(scope="module")
def rows(hub, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("rows"))
    data = datasets.load_dataset(str(hub / "mteb/banking77"), cache_dir=cache)
    return {split: data[split].to_list() for split in ("train", "test")}


def evaluate(manager, root, lm, shots=1, **keywords):
    name = f"longicl_banking77_{shots}shot"
    config = load_yaml(manager.task_index[name].yaml_path)
    config["dataset_path"] = str(root / config["dataset_path"])
    result = simple_evaluate(model=lm, tasks=[config], task_manager=manager, **keywords)
    return result["results"][name]


@pytest.mark.parametrize("shots", SHOTS)
def test_prompts_are_those_of_the_protocol(manager, hub, rows, shots):
    lm = Answering(lambda doc: "")
    # A number of shots from outside must not add lm-eval's own demonstrations.
    evaluate(manager, hub, lm, shots, num_fewshot=3)
    examples = protocol.demonstrations(rows["train"], shots)
    documents = protocol.test_documents(rows["test"])
    prompts, settings = zip(*lm.requests, strict=True)
    assert list(prompts) == [protocol.prompt(examples, doc["text"]) for doc in documents]
    greedy = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 100}
    assert settings[0] == {"until": [protocol.NEXT_QUERY], **greedy}


def test_right_answers_score_one_wrong_ones_zero_and_a_mixture_its_mean(manager, hub, rows):
    labels = {row["text"]: row["label_text"] for row in rows["test"]}
    documents = protocol.test_documents(rows["test"])
    first = {row["text"] for row in documents[:4]}

    def score(answer):
        result = evaluate(manager, hub, Answering(lambda doc: answer(doc["text"])))
        return result["exact_match,none"], result["exact_match_stderr,none"]

    assert score(lambda text: f"\n {labels[text].upper()}\nmore") == (1.0, 0.0)
    assert score(lambda text: f"not {labels[text]}") == (0.0, 0.0)
    n = len({row["text"] for row in documents})
    share = 4 / len(documents)
    mean, error = score(lambda text: labels[text] if text in first else "none")
    assert n == len(documents)
    assert mean == share
    assert error == pytest.approx((share * (1 - share) / (len(documents) - 1)) ** 0.5)
