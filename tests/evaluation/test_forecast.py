"""A forecast counts what a run computes, writes no record, and takes time from where it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capmoe_eval.evaluation import forecast as forecast_module
from capmoe_eval.evaluation.forecast import forecast, measured_rate, needed_memory, recorded_rate
from capmoe_eval.evaluation.loading import load_lm, reader_of, weightless
from capmoe_eval.evaluation.run import run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.evaluation.workload import Workload, workload
from capmoe_eval.experiment.configuration import Placement, Plan
from capmoe_eval.zoo.hub import ready
from tests import records


def small(*overrides: str) -> list[Plan]:
    return records.planned("model=tiny_olmoe", "batch_size=4", "limit=3", *overrides)


@pytest.mark.parametrize("task", ["obqa", "winogrande", "gsm8k", "longicl_1"])
def test_the_tokens_are_those_that_a_run_computes(tmp_path: Path, task: str) -> None:
    (plan,) = small(f"tasks={task}", "method=baseline", f"results_dir={tmp_path}")
    (record,) = run([plan]).records
    reader = reader_of(plan.cell.model)
    work = workload(plan.cell, TaskLibrary(), ready(plan.source), reader)
    assert work.documents == record.n == 3
    assert work.tokens == record.load.tokens


def test_the_tokens_of_images_count(tmp_path: Path) -> None:
    (plan,) = records.planned(
        "model=tiny_llava_olmoe", "tasks=mme", "limit=2", "batch_size=2", "method=baseline",
        f"results_dir={tmp_path}",
    )  # fmt: skip
    (record,) = run([plan]).records
    reader = reader_of(plan.cell.model)
    work = workload(plan.cell, TaskLibrary(), ready(plan.source), reader)
    assert work.tokens == record.load.tokens


def test_a_forecast_writes_nothing_and_names_each_task(tmp_path: Path) -> None:
    plans = small("tasks=table2", f"results_dir={tmp_path / 'r'}")
    text = forecast(plans, calibrate=False)
    assert "9 of 9 cells are missing; none was computed now." in text
    tasks = [line.split()[1] for line in text.splitlines()[2:11]]
    assert tasks == [plan.cell.task.name for plan in plans]
    assert "for 0 of 9 rows; plan=calibrate" in text
    assert not (tmp_path / "r").exists()


def test_a_finished_grid_needs_no_forecast(tmp_path: Path) -> None:
    plans = small("tasks=obqa", f"results_dir={tmp_path}")
    run(plans)
    assert forecast(plans, calibrate=False) == "All 1 cells are finished."


def test_an_unknown_tokenizer_leaves_the_documents(tmp_path: Path) -> None:
    plans = small("tasks=obqa", f"results_dir={tmp_path}")
    lost = dataclasses.replace(plans[0].cell.model, tokenizer=str(tmp_path / "none"))
    plans = [dataclasses.replace(p, cell=dataclasses.replace(p.cell, model=lost)) for p in plans]
    text = forecast(plans, calibrate=False)
    row = text.splitlines()[2].split()
    assert row[2:6] == ["1", "3", "12", "?"]
    assert "its tokens and its memory are not known: model.tokenizer=" in text


def test_calibration_times_what_no_record_tells(tmp_path: Path) -> None:
    text = forecast(small("tasks=obqa", f"results_dir={tmp_path}"), calibrate=True)
    assert text.splitlines()[2].endswith("measured")
    assert not list(tmp_path.iterdir())


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
    assert recorded_rate([dataclasses.replace(plans[0], placement=Placement(threads=7))]) is None
    plans[0].path.with_name("damaged.json").write_text("{")  # another cell's, which no run reads
    assert recorded_rate(plans) == rate


@pytest.mark.parametrize(("fixed", "each"), [(2.0, 0.5), (0.0, 1.0)])
def test_a_measured_rate_is_a_line_through_two_sizes(
    monkeypatch: pytest.MonkeyPatch, fixed: float, each: float
) -> None:
    asked: list[int] = []

    def evaluate(cell: Any, *args: object, **kwargs: object) -> object:
        asked.append(cell.limit)
        warmup = 10.0 if len(asked) == 1 else 0.0
        seconds = fixed + each * cell.limit + warmup
        return SimpleNamespace(n=cell.limit, provenance=SimpleNamespace(seconds=seconds))

    monkeypatch.setattr(forecast_module, "evaluate", evaluate)
    (plan,) = records.planned("model=tiny_olmoe", "batch_size=4", "tasks=obqa", "limit=null")
    plan = dataclasses.replace(plan, source=ready(plan.source))
    lm: Any = None
    rate = measured_rate(plan, lm, TaskLibrary(), 100)
    assert asked == [4, 4, 12]
    assert (rate.fixed, rate.each) == pytest.approx((fixed, each))


@pytest.mark.parametrize("name", ["tiny_olmoe", "zoo_mixtral", "tiny_llava_olmoe"])
def test_the_weights_are_as_large_as_the_loaded_model(name: str) -> None:
    (plan,) = records.planned(f"model={name}", "tasks=obqa")
    model = plan.cell.model
    assert all(each.is_meta for each in weightless(model).parameters())
    loaded = load_lm(model, Placement("cpu"), 1).model
    memory = needed_memory(model, [])
    assert memory.weights == sum(p.numel() * p.element_size() for p in loaded.parameters())
    assert memory.batch == 0


def test_the_batch_needs_two_copies_of_its_logits_and_its_cache() -> None:
    (plan,) = records.planned("model=tiny_olmoe", "tasks=obqa")
    config = weightless(plan.cell.model).config
    scored = Workload(1, 1, 10, 0, longest=10, scored=10)
    generated = Workload(1, 1, 10, 20, longest=30, scored=0)
    width = config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4
    works = [(8, scored), (4, generated)]
    memory = needed_memory(plan.cell.model, works)
    assert memory.batch == max(8 * 10 * (2 * config.vocab_size * 4 + cache), 4 * 30 * cache)
