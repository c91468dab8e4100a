"""NQ-Open is lm-eval's task on local files: any right answer counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.zoo.hub import ready


def built(root: str, name: str | None = None) -> Any:
    return TaskLibrary().get("nq_open", ready(data_source(root, name)))["tasks"]["nq_open"]


def prompt(task: Any, number: int) -> str:
    task.set_config("num_fewshot", load_option("tasks", "nq_open").nq_open.fewshot)
    task.set_fewshot_seed(1234)
    return str(task.fewshot_context(task.eval_docs[number], task.get_config("num_fewshot")))


@pytest.mark.real_data
def test_the_real_set_is_asked_with_five_shots(real_hub: Path) -> None:
    task = built(str(real_hub), "real")
    assert len(task.eval_docs) == 3610
    asked = prompt(task, 0)
    assert asked.startswith("Answer these questions:\n\nQ: ")
    assert asked.endswith("\nQ: when was the last time anyone was on the moon?\nA:")
    assert asked.count("\nQ: ") == 6
    assert asked.count("\nA: ") == 5
    for number in (0, 17, 1800, 3609):
        document = task.eval_docs[number]
        assert task.doc_to_target(document) == document["answer"]
