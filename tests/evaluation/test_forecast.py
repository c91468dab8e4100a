"""A forecast counts what a run computes, writes no record, and takes time from where it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capmoe_eval.evaluation.forecast import forecast, measured_rate, recorded_rate
from capmoe_eval.evaluation.loading import load_lm, weightless
from capmoe_eval.evaluation.preparation import with_documents
from capmoe_eval.evaluation.run import run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.configuration import CellPlan, DeviceConfig
from capmoe_eval.zoo.hub import ready
from tests import records


def small(*overrides: str) -> list[CellPlan]:
    return records.planned("model=tiny_olmoe", "batch_size=4", "limit=3", *overrides)


@pytest.mark.parametrize("name", ["tiny_olmoe", "zoo_mixtral"])
def test_a_forecast_has_the_documents_and_the_weights_of_what_is_missing(
    name: str, tmp_path: Path
) -> None:
    """Of a limit, every subtask has as many documents; no weights are loaded."""
    words = f"model={name}", "limit=3", "grid.gamma=[1.0,2.0]", f"results_dir={tmp_path}"
    plans = with_documents(records.planned(*words, "tasks=[obqa,zero_shot_mix]"))
    cell, source = plans[0].cell, plans[0].source  # of obqa
    origin = {"data_fingerprint": source.fingerprint(cell.task.dataset)}
    records.record(cell, tmp_path, provenance=origin).write()
    text = forecast(plans, calibrate=False)
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith(name)}
    assert text.startswith("Missing cells: 3 of 4. None was computed now")
    assert rows["obqa"][2:4] == ["1", "3"]
    assert rows["zero_shot_mix"][2:4] == ["2", str(2 * 3 * 4)]
    assert all(weight.is_meta for weight in weightless(cell.model).parameters())
    loaded = load_lm(cell.model, DeviceConfig("cpu"), 1).model
    size = sum(p.numel() * p.element_size() for p in loaded.parameters()) / 2**30
    assert f"{name}: {size:.2f} GiB of weights" in text


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
