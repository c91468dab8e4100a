"""The tasks give lm-eval the prompts of the protocol and score by it."""

from pathlib import Path

import datasets
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from capmoe_eval.evaluation import longicl
from capmoe_eval.evaluation.longicl.task import LongIclBanking77
from capmoe_eval.experiment import longicl as protocol
from capmoe_eval.zoo.synthetic.models import tiny_model
from capmoe_eval.zoo.synthetic.tokenizer import tiny_tokenizer

SHOTS = range(1, 6)


class Answering(LM):
    """A model that continues each prompt by what ``answer`` says to its last query."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.requests = []

    def generate_until(self, requests, disable_tqdm=False):
        self.requests = [request.args for request in requests]
        queries = [
            prompt.rsplit("service query: ", 1)[1].removesuffix("\nintent category: ")
            for prompt, _ in self.requests
        ]
        return [self.answer(query) for query in queries]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


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


def test_the_tasks_are_found(manager):
    assert manager.all_tasks == [f"longicl_banking77_{shots}shot" for shots in SHOTS]


@pytest.mark.parametrize("shots", SHOTS)
def test_prompts_are_those_of_the_protocol(manager, hub, rows, shots):
    lm = Answering(lambda query: "")
    # A number of shots from outside must not add lm-eval's own demonstrations.
    evaluate(manager, hub, lm, shots, num_fewshot=3)
    shown = protocol.demonstrations(rows["train"], shots)
    documents = protocol.test_documents(rows["test"])
    assert [prompt for prompt, _ in lm.requests] == [
        protocol.prompt(shown, document["text"]) for document in documents
    ]


def test_generation_is_greedy_for_100_tokens_up_to_the_next_query(manager, hub):
    lm = Answering(lambda query: "")
    evaluate(manager, hub, lm, limit=1)
    ((_, settings),) = lm.requests
    assert settings == {
        "until": [protocol.NEXT_QUERY],
        "do_sample": False,
        "temperature": 0.0,
        "max_gen_toks": 100,
    }


def test_right_answers_score_one_and_wrong_ones_zero(manager, hub, rows):
    labels = {row["text"]: row["label_text"] for row in rows["test"]}
    others = dict(zip(labels, [*list(labels.values())[1:], "none"], strict=True))
    wrong = {text: "none" if others[text] == labels[text] else others[text] for text in labels}

    right = evaluate(manager, hub, Answering(lambda query: f"\n {labels[query].upper()}\nmore"))
    assert (right["exact_match,none"], right["exact_match_stderr,none"]) == (1.0, 0.0)
    zero = evaluate(manager, hub, Answering(wrong.__getitem__))
    assert (zero["exact_match,none"], zero["exact_match_stderr,none"]) == (0.0, 0.0)


def test_a_mixture_has_its_mean_and_standard_error(manager, hub, rows):
    labels = {row["text"]: row["label_text"] for row in rows["test"]}
    known = protocol.test_documents(rows["test"])[:4]
    right = {row["text"] for row in known}
    lm = Answering(lambda query: labels[query] if query in right else "none")
    result = evaluate(manager, hub, lm)
    assert result["exact_match,none"] == 4 / 16
    assert result["exact_match_stderr,none"] == pytest.approx((0.25 * 0.75 / 15) ** 0.5)


def test_the_configuration_names_the_data_of_the_hub(manager):
    config = load_yaml(manager.task_index["longicl_banking77_5shot"].yaml_path)
    assert config["dataset_path"] == "mteb/banking77"
    assert config["class"] is LongIclBanking77
    assert config["metadata"] == {"version": 1.0, "shots": 5}


def test_five_shots_fit_a_tiny_model(manager, hub):
    tokenizer = tiny_tokenizer()
    model = tiny_model("olmoe", vocab_size=len(tokenizer))
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    result = evaluate(manager, hub, lm, shots=5, limit=1, log_samples=True)
    assert result["exact_match,none"] in {0.0, 1.0}


@pytest.mark.real_data
def test_the_real_task_asks_100_questions(manager, real_hub):
    lm = Answering(lambda query: "card_arrival")
    result = evaluate(manager, real_hub, lm, shots=5)
    assert len(lm.requests) == 100
    # Two passes over 77 labels cut at 100: card_arrival stands first in both.
    assert result["exact_match,none"] == pytest.approx(0.02)
