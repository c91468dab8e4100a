"""A trace that cannot be is refused; that of a run is the routing that its record counted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

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
from capmoe_serve.trace import (
    Trace,
    in_known_steps,
    load_trace,
    save_trace,
    steps_in_words,
    unsigned,
)

IDS = np.array([[[0, 3], [1, 2]], [[3, 1], [2, 0]], [[1, 0], [3, 2]]], dtype=np.uint8)
SCORES = np.linspace(0.1, 0.9, IDS.size, dtype=np.float16).reshape(IDS.shape)
LOADS = np.array([[[1, 1, 0, 0], [0, 2, 0, 0]]])


COUNTED = Trace(4, load_SLE=np.repeat(LOADS, 3, 0), top_k=1, decode_S=np.array([True, False, True]))


def changed(array: Any, value: Any) -> Any:
    array = array.copy()
    array[1, 1, 1] = value
    return array


def full() -> Trace:
    return Trace(
        4,
        IDS,
        SCORES,
        step_T=np.array([0, 0, 2]),
        decode_S=np.array([False, True]),
        layers=("a", "b"),
        model="mine",
        source="a test",
        ranks=2,
    )


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "expert_TLK, load_SLE: a trace has exactly one"),
        ({"expert_TLK": IDS, "load_SLE": LOADS}, "expert_TLK, load_SLE"),
        ({"expert_TLK": IDS, "n_experts": 3}, "expert_TLK=3: experts are numbered from 0 to 2"),
        (
            {"expert_TLK": IDS, "n_experts": 10**10},
            "n_experts=10000000000: must be a whole number from 1 to 4096",
        ),
        ({"expert_TLK": IDS, "source": None}, "source=null: must be text"),
        ({"expert_TLK": IDS, "model": "\x1b[31m"}, r"model=\\x1b\[31m: must be text in one line"),
        ({"load_SLE": LOADS << 61}, "load_SLE: .* pairs in all; counts may sum to"),
        (
            {"expert_TLK": IDS, "score_TLK": np.full(IDS.shape, 1e308)},
            r"score_TLK=1e\+308: a gate score",
        ),
        ({"expert_TLK": IDS.astype(int)}, r"expert_TLK: int64 \[3, 2, 2\]; must be unsigned"),
        ({"expert_TLK": IDS[0]}, r"expert_TLK: uint8 \[2, 2\]"),
        ({"expert_TLK": IDS[:0]}, r"expert_TLK: uint8 \[0, 2, 2\]"),
        ({"expert_TLK": changed(IDS, 2)}, "token 1 has expert 2 twice in layer 1"),
        ({"expert_TLK": IDS, "top_k": 3}, "top_k=3: expert_TLK has 2"),
        ({"expert_TLK": IDS, "ranks": 3}, "ranks=3: 4 experts cannot be spread evenly"),
        ({"expert_TLK": IDS, "layers": ("a",)}, "layers: 1 names for 2 layers"),
        ({"expert_TLK": IDS, "score_TLK": SCORES[:2]}, r"score_TLK: float16 \[2, 2, 2\]; must be"),
        ({"expert_TLK": IDS, "score_TLK": IDS}, "score_TLK: uint8"),
        ({"expert_TLK": IDS, "score_TLK": changed(SCORES, -1)}, "score_TLK=-1.0: .*token 1, layer"),
        ({"expert_TLK": IDS, "score_TLK": changed(SCORES, np.nan)}, "score_TLK=nan"),
        ({"expert_TLK": IDS, "score_TLK": changed(SCORES, np.inf)}, "score_TLK=inf"),
        ({"expert_TLK": IDS, "step_T": np.array([0, 2, 1])}, "step_T: must begin"),
        ({"expert_TLK": IDS, "step_T": np.array([-1, 0, 1])}, "step_T: must begin"),
        ({"expert_TLK": IDS, "step_T": np.array([0, 1])}, r"step_T: int64 \[2\]; must be integers"),
        ({"expert_TLK": IDS, "step_T": np.array([0.5, 1, 2])}, "step_T: float64"),
        ({"load_SLE": LOADS - [[[0], [1]]]}, r"load_SLE=-1: a count .*\(step 0, layer 1\)"),
        ({"load_SLE": LOADS / 2}, "load_SLE: float64"),
        ({"load_SLE": LOADS, "n_experts": 5}, r"load_SLE: int64 .* \[steps, layers, 5\]"),
        ({"load_SLE": LOADS, "top_k": 3}, "top_k=3: a step's counts"),
        ({"load_SLE": 5 * LOADS, "top_k": 5}, "top_k=5: .* or there are fewer experts"),
        ({"load_SLE": LOADS, "step_T": np.array([0])}, "step_T: belongs to expert_TLK"),
        ({"expert_TLK": IDS, "decode_S": np.array([True])}, "decode_S: .* need step_T"),
        ({"load_SLE": LOADS, "decode_S": np.array([1])}, r"decode_S: int64 \[1\]; must be bool"),
        ({"load_SLE": LOADS, "decode_S": np.array([True] * 2)}, r"decode_S: bool \[2\]"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match=part) as refused:
        Trace(**{"n_experts": 4} | fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trace", [full(), COUNTED, Trace(4, IDS)])
def test_it_is_read_as_it_was_written(trace: Trace, tmp_path: Path) -> None:
    save_trace(trace, tmp_path / "a.npz")
    copy = load_trace(tmp_path / "a.npz")
    for field in Trace.__dataclass_fields__:
        written, read = getattr(trace, field), getattr(copy, field)
        if isinstance(written, np.ndarray):
            np.testing.assert_array_equal(written, read)
            assert written.dtype == read.dtype
        else:
            assert written == read
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_steps_and_loads() -> None:
    trace = full()
    assert (trace.n_tokens, trace.n_steps, trace.top_k) == (3, 2, 2)
    counted = np.zeros((2, 2, 4), dtype=int)
    for token, step in enumerate((0, 0, 1)):
        for layer in range(2):
            counted[step, layer, IDS[token, layer]] += 1
    np.testing.assert_array_equal(trace.loads(), counted)
    cut = dataclasses.replace(trace, decode_S=None).in_steps(2)
    assert cut.step_T.tolist() == [0, 0, 1]  # type: ignore[union-attr]
    assert COUNTED.n_tokens == COUNTED.n_steps * 2
    assert Trace(4, IDS).n_steps == 1
    assert [steps_in_words(steps, None) for steps in (1, 2)] == ["1 step", "2 steps"]
    assert unsigned(np.array([300])).dtype == np.uint16
    with pytest.raises(UsageError, match="expert_TLK=-1"):
        unsigned(np.array([-1]))


def test_parts_have_their_loads_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for trace in (full(), COUNTED):
        assert trace.load(0) is trace.load(0)
        assert (trace.second_half().loads() == trace.loads()[trace.n_steps // 2 :]).all()
        for kind, is_decode in (("prompts", False), ("decode", True)):
            only = trace.only(kind)  # type: ignore[arg-type]
            assert (only.loads() == trace.loads()[trace.decode_S == is_decode]).all()
            assert only.decode_steps == is_decode * only.n_steps
    assert len(full().only("prompts").score_TLK) == 2
    again = in_known_steps(full(), 1, "prompts")
    assert again.source.startswith("a test; assumed steps of 1 tokens")
    assert (again.n_steps, again.decode_steps) == (2, 0)
    monkeypatch.setattr("capmoe_serve.trace._MOST_LOADS", 7)
    with pytest.raises(UsageError, match="2 steps × 4 experts are too many"):
        full().load(0)


def test_steps_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="step tokens: the trace has prompts and decode steps"):
        in_known_steps(full(), 2)
    with pytest.raises(UsageError, match="only=prompts: the trace has no such step"):
        full().only("decode").only("prompts")
    with pytest.raises(UsageError, match="only=decode: the trace does not say"):
        Trace(4, IDS).only("decode")
    with pytest.raises(UsageError, match="only=prefill: choose one of prompts, decode"):
        full().only("prefill")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="step tokens=0: must be a whole number of at least 1"):
        full().in_steps(0)


def test_a_packed_array_of_too_many_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capmoe_serve.trace._MOST_UNPACKED", 2**10)
    trace = Trace(4, np.zeros((2**20, 1, 1), dtype=np.uint8))
    save_trace(trace, tmp_path / "a.npz")
    assert load_trace(tmp_path / "a.npz").n_tokens == 2**20
    with np.load(tmp_path / "a.npz") as arrays:
        np.savez_compressed(tmp_path / "a.npz", **dict(arrays))
    with pytest.raises(UsageError, match=r"expert_TLK\.npy: has 1,048,704 bytes, too many"):
        load_trace(tmp_path / "a.npz")
    with pytest.raises(UsageError, match=r"format=\.parquet: choose one of \.npz"):
        save_trace(trace, tmp_path / "a.parquet")


# The trace of a run.

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
