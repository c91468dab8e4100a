"""MTS-Dialog is asked as its file says, and scored as ROUGE is defined."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.model import LM

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation.mts_dialog import ROUGE, MtsDialog, check
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, TaskId
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.zoo.hub import ready
from tests.records import planned

NAME = "capmoe_mts_dialog"


def built(root: str, name: str | None = None) -> MtsDialog:
    task = TaskLibrary().get(NAME, ready(data_source(root, name)))["tasks"][NAME]
    assert isinstance(task, MtsDialog)
    return task


@pytest.fixture(scope="module", name="task")
def of_the_miniworld() -> MtsDialog:
    return built("miniworld")


class Answering(LM):
    """A model that gives the answers it is told."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.prompts: list[tuple[str, Any]] = []

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        self.prompts = [request.args for request in requests]
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluated(task: MtsDialog, answer: Any, limit: int | None = None) -> tuple[Answering, Any]:
    model = Answering(answer)
    tasks = {"tasks": {NAME: task}, "groups": {}}
    return model, lm_eval.evaluator.evaluate(lm=model, task_dict=tasks, limit=limit)


@pytest.mark.real_data
def test_the_real_set_is_asked_for_the_note_of_a_dialogue(real_hub: Path) -> None:
    task = built(str(real_hub), "real")
    model, _ = evaluated(task, lambda doc: "", limit=2)
    assert len(task.eval_docs) == 200
    first = task.eval_docs[0]
    prompt, settings_ = model.prompts[0]
    assert prompt == f"{first['dialogue']}\nNote:"
    assert prompt.startswith("Doctor: ") and "\nPatient: " in prompt
    assert settings_["until"] == ["\n\n"] and settings_["max_gen_toks"] == 256
    assert task.doc_to_target(first) == first["section_text"]


def test_the_note_itself_scores_full_and_nothing_scores_none(task: MtsDialog) -> None:
    for answer, score in ((lambda doc: doc["section_text"], 1.0), (lambda doc: "", 0.0)):
        _, found = evaluated(task, answer)
        assert {found["results"][NAME][f"{name},none"] for name in ROUGE} == {score}
        # Short answers are not left out.
        assert found["n-samples"][NAME]["effective"] == 164 == len(found["samples"][NAME])


def test_another_task_is_not_meant(task: MtsDialog) -> None:
    assert task.get_config("task") == NAME != "mts_dialog"
    (plan,) = planned("tasks=mts_dialog", "method=baseline")
    assert plan.cell.task.lm_eval == NAME and plan.cell.task.metric == "rougeL"


WORDS = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "and", "dog"]), max_size=7)


def naive(name: str, reference: list[str], answer: list[str]) -> float:
    """ROUGE's F-measure by its definition."""
    if name == "rougeL":
        lengths = {(0, 0): 0}
        for i in range(len(reference) + 1):
            for j in range(len(answer) + 1):
                if not i or not j:
                    lengths[i, j] = 0
                elif reference[i - 1] == answer[j - 1]:
                    lengths[i, j] = lengths[i - 1, j - 1] + 1
                else:
                    lengths[i, j] = max(lengths[i - 1, j], lengths[i, j - 1])
        common, sizes = lengths[len(reference), len(answer)], (len(reference), len(answer))
    else:
        n = int(name[-1])
        grams = [
            Counter(tuple(x[k : k + n]) for k in range(len(x) - n + 1)) for x in (reference, answer)
        ]
        common = sum((grams[0] & grams[1]).values())
        sizes = (sum(grams[0].values()), sum(grams[1].values()))
    if not common:
        return 0.0
    recall, precision = common / sizes[0], common / sizes[1]
    return 2 * recall * precision / (recall + precision)


@settings(max_examples=60, deadline=None)
@given(reference=WORDS, answer=WORDS)
def test_rouge_is_its_definition(task: MtsDialog, reference: list[str], answer: list[str]) -> None:
    document = {"section_text": " ".join(reference).capitalize() + "."}
    scores = task.process_results(document, [" " + " ".join(answer)])
    assert scores.keys() == set(ROUGE)
    for name in ROUGE:
        assert scores[name] == pytest.approx(naive(name, reference, answer)), name


def of(**fields: Any) -> TaskId:
    return TaskId("mts_dialog", NAME, "har1/MTS", **{"metric": "rougeL", **fields})


def test_an_encoder_is_part_of_the_identity_and_its_absence_is_not() -> None:
    plain = of()
    assert not {"encoder", "layer", "rescale"} & plain.identity().keys()
    named = of(encoder="roberta-large", layer=17)
    assert named.identity() | {"x": 0} == plain.identity() | {
        "encoder": "roberta-large",
        "layer": 17,
        "rescale": False,
        "x": 0,
    }
    words = ["tasks=mts_dialog", "method=baseline", "tasks.mts_dialog.metric=bertscore_f1"]
    named_words = ["tasks.mts_dialog.encoder=roberta-large", "tasks.mts_dialog.layer=17"]
    (plan,) = planned(*words, *named_words)
    assert Cell.from_identity(plan.cell.identity()) == plan.cell
    command = cell_command(plan.cell, "results/zoo")
    assert command is not None and all(word in command for word in (*words[2:], *named_words))
    (other,) = planned("tasks=mts_dialog", "method=baseline")
    assert "encoder" not in str(cell_command(other.cell, "results/zoo"))
    assert "rescale" not in str(cell_command(planned("tasks=obqa")[0].cell, "results/zoo"))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"metric": "bertscore_f1"}, r"tasks.mts_dialog.metric=bertscore_f1: needs an encoder; "),
        ({"encoder": "/nowhere/bert", "layer": 2}, r"encoder=/nowhere/bert"),
    ],
)
def test_a_bertscore_that_cannot_be_had_is_refused(
    task: MtsDialog, fields: dict[str, Any], line: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        check(of(**fields), [task])


def test_a_layer_without_an_encoder_is_refused_and_so_is_an_encoder_elsewhere() -> None:
    with pytest.raises(UsageError, match=r"tasks.mts_dialog.layer=3: is of an encoder; name one"):
        of(layer=3)
    other = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc", encoder="roberta-large")
    with pytest.raises(UsageError, match=r"tasks.obqa.encoder=roberta-large: obqa has no BERTSc"):
        check(other, [])
