"""The tasks read the picture world as they would the hub, and a model that is right scores full."""

import json
import shutil

import datasets
import lm_eval.evaluator
import pytest
from lm_eval.api.model import LM

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.multimodal import prompts, scores
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.configuration import load_option
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.zoo.hub import ready
from capmoe_eval.zoo.pictures.evaluation import SETS, documents

FIRST = {"mme": "lmms-lab/MME", "mmbench": "lmms-lab/MMBench", "seedbench": "lmms-lab/SEED-Bench"}


class Answering(LM):
    """A model that gives the answers it is told, and notes what it is shown."""

    MULTIMODAL = True

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.seen = []

    def generate_until(self, requests, disable_tqdm=False):
        self.seen += [request.args for request in requests]
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.fixture(scope="module", name="tasks")
def built():
    source = ready(data_source("pictures"))
    library = TaskLibrary()
    return {name: library.get(name, source) for name in FIRST}


def evaluated(tasks, name, answer, limit=None):
    model = Answering(answer)
    return model, lm_eval.evaluator.evaluate(lm=model, task_dict=tasks[name], limit=limit)


def test_right_answers_score_full_and_the_errors_are_metrics(tasks):
    _, found = evaluated(tasks, "mme", lambda doc: doc["answer"])
    results = found["results"]["mme"]
    assert results["perception,none"] == 2000 and results["cognition,none"] == 800
    assert results["perception_stderr,none"] == 0 and results["acc,none"] == 1
    _, found = evaluated(tasks, "mmbench", lambda doc: doc["answer"])
    assert found["results"]["mmbench"]["circular,none"] == 1
    assert {
        found["results"]["mmbench"][f"{name},none"] for name in scores.CAPABILITIES.values()
    } == {1}
    _, found = evaluated(tasks, "seedbench", lambda doc: doc["answer"])
    assert {
        found["results"]["seedbench"][f"{name},none"] for name in scores.DIMENSIONS.values()
    } == {1}


def test_one_answer_to_all_scores_as_chance_does(tasks):
    _, found = evaluated(tasks, "mme", lambda _doc: "yes")
    results = found["results"]["mme"]
    assert results["perception,none"] == pytest.approx(500)  # half the questions, no picture
    assert results["existence,none"] == pytest.approx(50)
    assert results["existence_stderr,none"] == 0  # every picture has the same score
    _, found = evaluated(tasks, "mmbench", lambda _doc: "A")
    assert found["results"]["mmbench"]["acc,none"] == pytest.approx(0.25)
    assert found["results"]["mmbench"]["circular,none"] == 0
    _, found = evaluated(tasks, "seedbench", lambda _doc: "A")
    results = found["results"]["seedbench"]
    assert 0.2 < results["acc,none"] < 0.3 and 0.01 < results["acc_stderr,none"] < 0.02


def test_a_query_is_a_prompt_and_a_picture(tasks):
    model, found = evaluated(tasks, "mmbench", lambda doc: doc["answer"], limit=2)
    text, _, shown = model.seen[0]
    row = documents()["lmms-lab/MMBench"]["en"]["dev"][0]
    lines = [f"{letter}. {row[letter]}" for letter in "ABCD"]
    assert text == "\n".join(["<image>", row["question"], *lines, "Answer:"])
    (image,) = shown["visual"]
    assert image.size == (96, 96) and image.mode == "RGB"
    again = evaluated(tasks, "mmbench", lambda doc: doc["answer"], limit=2)[1]
    hashes = [
        [sample["doc_hash"] for sample in one["samples"]["mmbench"]] for one in (found, again)
    ]
    assert hashes[0] == hashes[1]  # a decoded picture would be hashed by its place in memory


def test_a_task_reads_the_data_set_that_is_named(tmp_path):
    source = ready(data_source("pictures"))
    shutil.copytree(source.root / "lmms-lab/MME", tmp_path / "lmms-lab-encoder/MME")
    moved, library = data_source(str(tmp_path)), TaskLibrary()
    built = library.get("mme", moved, "lmms-lab-encoder/MME")["tasks"]["mme"]
    assert built.config.dataset_path == str(tmp_path / "lmms-lab-encoder/MME")
    assert len(built.eval_docs) == len(documents()["lmms-lab/MME"]["default"]["test"])
    asked = TaskId("mme", "mme", "lmms-lab-encoder/MME", "acc", images=True)
    library.check_programs(asked, moved)  # reads no other
    with pytest.raises(UsageError, match="no dataset 'lmms-lab/MME'"):
        library.get("mme", moved)


def test_a_group_reads_what_its_tasks_say(hub):
    source, parts = DataSource("synthetic", hub), "allenai/openbookqa + baber/piqa"
    with pytest.raises(UsageError, match=r"zero_shot_mix: dataset=.*it reads allenai/openbookqa"):
        TaskLibrary().get("zero_shot_mix", source, parts)


def test_a_hint_stands_first_and_an_absent_option_is_left_out():
    doc = {"hint": "Look well.", "question": "Which?", "A": "x", "B": "y", "C": "nan", "D": None}
    assert prompts.mmbench_prompt(doc) == "<image>\nLook well.\nWhich?\nA. x\nB. y\nAnswer:"


def test_videos_are_left_out():
    found = datasets.Dataset.from_dict(
        {"data_type": ["image", "video"], "image": [[], []], "question": ["a", "b"]},
        features=datasets.Features(
            {
                "data_type": datasets.Value("string"),
                "image": [datasets.Image()],
                "question": datasets.Value("string"),
            }
        ),
    )
    assert prompts.of_pictures(found)["question"] == ["a"]


def test_the_categories_are_those_of_the_world():
    assert [*scores.MME["perception"], *scores.MME["cognition"]] == list(SETS.mme)
    assert list(scores.CAPABILITIES) == list(SETS.mmbench)
    assert len(scores.DIMENSIONS) == len(SETS.seedbench)


@pytest.mark.parametrize("name", FIRST)
def test_the_options_are_the_tasks(tasks, name):
    option = load_option("tasks", name)[name]
    task = tasks[name]["tasks"][name]
    assert option["dataset"] == FIRST[name] and option["lm_eval"] == name
    assert option["metric"] in task.aggregation()
    assert json.dumps(task.config.metadata)
