"""A forecast counts what a run computes, writes no record, and takes time from where it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capmoe_eval.evaluation import memory
from capmoe_eval.evaluation.forecast import forecast, measured_rate, recorded_rate
from capmoe_eval.evaluation.loading import load_lm, weightless
from capmoe_eval.evaluation.memory import batch_bytes, peak_bytes, weights_bytes
from capmoe_eval.evaluation.run import run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.evaluation.workload import WorkCounter
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.configuration import CellPlan, DeviceConfig
from capmoe_eval.experiment.record_part import Truncated
from capmoe_eval.zoo.hub import ready
from capmoe_eval.zoo.tiny import TINY_FAMILIES
from tests import records


def small(*overrides: str) -> list[CellPlan]:
    return records.planned("model=tiny_olmoe", "batch_size=4", "limit=3", *overrides)


@pytest.mark.parametrize(
    "words",
    [
        *(("model=tiny_olmoe", f"tasks={task}") for task in ("winogrande", "gsm8k", "longicl_1")),
        ("model=tiny_llava_olmoe", "tasks=mme"),
        ("model=tiny_olmoe", "tasks=winogrande", "model.max_length=16"),
        ("model=tiny_olmoe", "tasks=gsm8k", "model.max_length=300"),
    ],
)
def test_the_tokens_are_those_that_a_run_computes(tmp_path: Path, words: Sequence[str]) -> None:
    more = ("batch_size=4", "limit=3", "method=baseline", f"results_dir={tmp_path}")
    (plan,) = records.planned(*words, *more)
    summary = run([plan])
    (record,) = summary.records
    plan = dataclasses.replace(plan, source=ready(plan.source))
    work = WorkCounter([plan]).work(plan)
    assert (work.documents, work.tokens) == (record.n, record.load.tokens)
    assert record.n == 3
    assert record.truncated == Truncated(
        documents=work.truncated, tokens=work.lost, max_length=work.max_length
    )
    expected = []
    if "model.max_length" in str(words):
        length = plan.cell.model.max_length
        expected = [
            f"{record.task} on tiny_olmoe: prompts of 3 of 3 documents are truncated, by up to "
            f"{work.lost} tokens on the left, to fit the model's {length}; choose fewer examples "
            f"(tasks.{record.task}.fewshot=N), or a model or model.max_length that takes more"
        ]
    assert list(summary.truncations) == expected
    plan = dataclasses.replace(plan, overwrite=True)
    warned = [
        line for line in forecast([plan], calibrate=False).splitlines() if "are truncated" in line
    ]
    assert warned == [f"warning: {line}" for line in expected]


def test_without_the_tokenizer_documents_are_counted_and_no_tokens(tmp_path: Path) -> None:
    name = "model=custom", "model.name=mine", f"model.pretrained={tmp_path}", "data.root=miniworld"
    (plan,) = records.planned(*name, "tasks=winogrande", "limit=3", "method=baseline")
    plan = dataclasses.replace(plan, source=ready(plan.source))
    work = WorkCounter([plan]).work(plan)
    assert (work.documents, work.requests, work.tokens) == (3, 6, 0)


def test_a_recorded_rate_is_of_like_records_alone(tmp_path: Path) -> None:
    plans = small("tasks=obqa", "grid.gamma=[1.0,2.0]", f"results_dir={tmp_path}")
    run(plans)
    rate = recorded_rate(plans)
    assert rate is not None
    assert rate.source == "2 finished"
    for change in (
        {"batch_size": 2},
        {"model": dataclasses.replace(plans[0].cell.model, dtype="bfloat16")},
    ):
        other = dataclasses.replace(plans[0], cell=dataclasses.replace(plans[0].cell, **change))
        assert recorded_rate([other]) is None
    assert recorded_rate([dataclasses.replace(plans[0], placement=DeviceConfig(threads=7))]) is None
    plans[0].path.with_name("damaged.json").write_text("{")  # another cell's, which no run reads
    assert recorded_rate(plans) == rate


@pytest.mark.parametrize(
    ("fixed", "each", "limit", "timed"),
    [(2.0, 0.5, "null", [4, 4, 12]), (0.0, 1.0, "null", [4, 4, 12]), (2.0, 0.5, "5", [4, 4, 5])],
)
def test_a_measured_rate_is_a_line_through_two_sizes(
    monkeypatch: pytest.MonkeyPatch, fixed: float, each: float, limit: str, timed: list[int]
) -> None:
    """Of a cell of few documents no more are timed than it has."""
    limits: list[int] = []

    def evaluate(cell: Any, *_: object, **__: object) -> object:
        limits.append(cell.limit)
        warmup = 10.0 if len(limits) == 1 else 0.0
        seconds = fixed + each * cell.limit + warmup
        return SimpleNamespace(n=cell.limit, provenance=SimpleNamespace(seconds=seconds))

    monkeypatch.setattr("capmoe_eval.evaluation.evaluate.evaluate", evaluate)
    (plan,) = records.planned("model=tiny_olmoe", "batch_size=4", "tasks=obqa", f"limit={limit}")
    plan = dataclasses.replace(plan, source=ready(plan.source))
    lm: Any = None
    rate = measured_rate(plan, lm, TaskLibrary(), 100)
    assert limits == timed
    assert (rate.fixed, rate.each) == pytest.approx((fixed, each))


@pytest.mark.parametrize("name", ["tiny_olmoe", "zoo_mixtral", "tiny_llava_olmoe"])
def test_the_weights_are_as_large_as_the_loaded_model(name: str) -> None:
    (plan,) = records.planned(f"model={name}", "tasks=obqa")
    model = plan.cell.model
    assert all(weight.is_meta for weight in weightless(model).parameters())
    loaded = load_lm(model, DeviceConfig("cpu"), 1).model
    assert weights_bytes(model) == sum(p.numel() * p.element_size() for p in loaded.parameters())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_forecast_of_a_batch_is_what_a_batch_needs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of DeepSeek's keys and values 3.6 times as much was forecast, of activations nothing.

    A tenth is left for what is in float32 in a model of bfloat16.
    """
    model = ModelId("wide", f"tiny:{family}", dtype="bfloat16")
    stock = load_lm(model, DeviceConfig("cpu"), 1).model

    # DeepSeek's heads have two widths, for which a CPU has no fused kernel.
    def fused(*args: Any, **kwargs: Any) -> torch.Tensor:
        return memory.fused(*args, **kwargs).zero_()

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    tokens_BS = torch.zeros(8, 64, dtype=torch.long)

    def scored() -> object:
        return stock(tokens_BS).logits.log_softmax(dim=-1)

    with torch.no_grad():
        peaks = {
            True: peak_bytes(scored),
            False: peak_bytes(lambda: stock(tokens_BS, logits_to_keep=1)),
        }
        cache = stock(tokens_BS, logits_to_keep=1).past_key_values
    for is_scored, peak in peaks.items():
        forecast = batch_bytes(model, sequences=8, longest=64, new=0, scored=is_scored)
        assert forecast == pytest.approx(peak, rel=0.1)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert batch_bytes(model, sequences=8, longest=6400, new=6336, scored=False) == 100 * kept
