"""The trace of a run is the routing that its record counted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import TaskId
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.plan import GAMMA_GRID
from tests.records import planned

from capmoe_serve.recording import TraceObserver
from capmoe_serve.summary import summarise
from capmoe_serve.trace import load_trace

NOTES = TaskId("mts_dialog", "capmoe_mts_dialog", "har1/MTS_Dialogue-Clinical_Note", "rougeL")


def plan(
    root: Path, method: Method, *observers: TraceObserver, model: str = "tiny_olmoe"
) -> CellPlan:
    words = (f"model={model}", "tasks=obqa", "limit=2", "batch_size=4", "device=cpu")
    (each,) = planned(*words, f"results_dir={root}")
    cell = dataclasses.replace(each.cell, method=method)
    return dataclasses.replace(each, cell=cell, observers=observers)


@pytest.mark.parametrize("method", [create_method("baseline"), create_method("score", 1.0)])
def test_it_holds_what_the_record_counted(method: Method, tmp_path: Path) -> None:
    traced = plan(tmp_path / "results", method, TraceObserver(str(tmp_path / "traces")))
    plain = plan(tmp_path / "plain", method)
    (record,), (without,) = run([traced]).records, run([plain]).records
    assert record.path.name == without.path.name
    assert (record.layers, record.value) == (without.layers, without.value)
    assert not list((tmp_path / "plain").rglob("*.npz"))

    trace = load_trace(
        (tmp_path / "traces" / record.path.relative_to(tmp_path / "results")).with_suffix(".npz")
    )
    layers, capacities = summarise(trace, GAMMA_GRID)
    assert (trace.model, trace.ranks) == (record.model, None)
    assert trace.n_tokens == record.load.tokens
    assert [*layers.index[:-1]] == [layer.name for layer in record.layers]
    for number, counted in enumerate(record.layers):
        layer, at = layers.iloc[number], capacities.loc[counted.name]
        assert trace.load(number).sum(axis=0).tolist() == counted.load_before
        assert layer["expert_max"] == pytest.approx(counted.peak["expert_before"]["max"])
        assert layer["expert_mean"] == pytest.approx(counted.peak["expert_before"]["mean"])
        assert at["dropped"].tolist() == pytest.approx(counted.grid.drop_rate, abs=1e-6)
        wastes = [math.nan if waste is None else waste for waste in counted.grid.pad_waste]
        assert at["padding"].tolist() == pytest.approx(wastes, abs=1e-6, nan_ok=True)
    if method.is_stock:  # the scores are those of Figure 8, a token's highest first
        means = np.sort(trace.score_TLK, axis=2)[:, :, ::-1].mean(axis=0)
        for mean, counted in zip(means, record.layers, strict=True):
            assert mean.tolist() == pytest.approx(counted.score_by_rank[: len(mean)], abs=1e-5)


@pytest.mark.numeric
def test_it_has_every_decode_step_whatever_the_method_concerns(tmp_path: Path) -> None:
    """Under a method that bounds decode steps and never binds, the record counts them, too."""
    methods = {
        "prompts": create_method("baseline"),
        "both": create_method("score", 1000.0, decode="constrained"),
    }
    traces, records = {}, {}

    for name, method in methods.items():
        # Answers of a trained model end, and not all at once.
        observer = TraceObserver(str(tmp_path / name / "traces"))
        asked = plan(tmp_path / name, method, observer, model="zoo_olmoe")
        cell = dataclasses.replace(asked.cell, task=NOTES, limit=4)
        (records[name],) = run([dataclasses.replace(asked, cell=cell)]).records
        (path,) = (tmp_path / name / "traces").rglob("*.npz")
        traces[name] = load_trace(path)
    for name, trace in traces.items():
        for field in ("expert_TLK", "score_TLK", "step_T", "decode_S"):
            np.testing.assert_array_equal(getattr(trace, field), getattr(traces["both"], field))
        decode = records["both"].load.decode
        assert trace.decode_steps == records["both"].load.decode_forwards
        only = trace.only("decode")
        assert only.n_tokens == decode.live * trace.decode_steps
        assert only.n_tokens < 4 * trace.decode_steps, "no answer ends before the others"
        concerned = {"prompts": trace.only("prompts"), "both": trace}[name]
        for layer, counted in enumerate(records[name].layers):
            assert concerned.loads().sum(axis=0)[layer].tolist() == counted.load_before


def test_it_ends_with_the_forward_that_reaches_the_limit(tmp_path: Path) -> None:
    observer = TraceObserver(str(tmp_path / "traces"), trace_tokens=1)
    asked = plan(tmp_path / "results", create_method("baseline"), observer)
    asked = dataclasses.replace(asked, cell=dataclasses.replace(asked.cell, batch_size=1))
    (record,) = run([asked]).records
    (path,) = (tmp_path / "traces").rglob("*.npz")
    trace = load_trace(path)
    assert trace.n_steps == 1
    assert trace.source.endswith(f"the first {trace.n_tokens} of {record.load.tokens} tokens")
    path.unlink()
    with pytest.raises(UsageError, match=r"^save_trace=.*is finished.*overwrite=true"):
        run([asked])
