"""The tasks read the picture world as they would the hub, and a model that is right scores full."""

import shutil

import datasets
import lm_eval.evaluator
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.multimodal import prompts, scores
from capmoe_eval.evaluation.run import check_task
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.zoo.hub import ready
from capmoe_eval.zoo.sets import documents
from tests.evaluation.answering import Answering

FIRST = {"mme": "lmms-lab/MME", "mmbench": "lmms-lab/MMBench", "seedbench": "lmms-lab/SEED-Bench"}


@pytest.fixture(scope="module", name="tasks")
def built():
    source = ready(data_source("pictures"))
    library = TaskLibrary()
    return {name: library.get(name, source) for name in FIRST}


def evaluated(tasks, name, answer, limit=None):
    model = Answering(answer)
    return model, lm_eval.evaluator.evaluate(lm=model, task_dict=tasks[name], limit=limit)


def scores_of(tasks, name, answer):
    _, result = evaluated(tasks, name, answer)
    return {key.removesuffix(",none"): value for key, value in result["results"][name].items()}


@pytest.mark.slow
def test_right_answers_score_full_and_the_errors_are_metrics(tasks):
    mme = scores_of(tasks, "mme", lambda doc: doc["answer"])
    full = {"perception": 2000, "cognition": 800, "perception_stderr": 0, "acc": 1}
    assert {name: mme[name] for name in full} == full
    mmbench = scores_of(tasks, "mmbench", lambda doc: doc["answer"])
    assert {mmbench[name] for name in ("circular", *scores.CAPABILITIES.values())} == {1}
    seedbench = scores_of(tasks, "seedbench", lambda doc: doc["answer"])
    assert {seedbench[name] for name in scores.DIMENSIONS.values()} == {1}


def test_a_task_reads_the_data_set_that_is_named(tmp_path):
    source = ready(data_source("pictures"))
    shutil.copytree(source.root / "lmms-lab/MME", tmp_path / "lmms-lab-encoder/MME")
    moved, library = data_source(str(tmp_path)), TaskLibrary()
    built = library.get("mme", moved, "lmms-lab-encoder/MME")["tasks"]["mme"]
    assert built.config.dataset_path == str(tmp_path / "lmms-lab-encoder/MME")
    assert len(built.eval_docs) == len(documents("pictures")["lmms-lab/MME"]["default"]["test"])
    asked = TaskId("mme", "mme", "lmms-lab-encoder/MME", "acc", images=True)
    check_task(library, asked, moved)  # reads no other
    with pytest.raises(UsageError, match="no dataset 'lmms-lab/MME'"):
        library.get("mme", moved)


def test_videos_are_left_out():
    rows = datasets.Dataset.from_dict(
        {"data_type": ["image", "video"], "image": [[], []], "question": ["a", "b"]},
        features=datasets.Features(
            {
                "data_type": datasets.Value("string"),
                "image": [datasets.Image()],
                "question": datasets.Value("string"),
            }
        ),
    )
    assert prompts.of_pictures(rows)["question"] == ["a"]
