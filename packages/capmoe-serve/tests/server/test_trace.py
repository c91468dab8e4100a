"""The trace of a server: what its routers chose, whatever ends the server."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capmoe_eval.errors import UnwritableError, UsageError
from capmoe_eval.routing.registry import create_method

from capmoe_serve.server import trace as module
from capmoe_serve.server.seam import install
from capmoe_serve.server.trace import TraceWriter, new_trace_path
from capmoe_serve.trace import Trace, load_trace
from server.stand_ins import MIXED, E, K, LayerCall, Served


class Recorded(Served):
    """Layers under a method whose routers are recorded in a file."""

    def __init__(self, path: Path, limit: int = 1000, **knobs: Any) -> None:
        super().__init__("score", 0.5, **knobs)
        self.path = path
        meter = self.capacity.meter
        self.writer = TraceWriter(path, limit, meter.layers, model="toy", source="a test")
        meter.observe(self.writer)

    def trace(self) -> Trace:
        """Return the file's content, once it is written."""
        self.writer.close()
        return load_trace(self.path)


def routed(steps: list[list[LayerCall]]) -> tuple[Any, Any]:
    """Return scores and experts of the tokens of mixed steps, of prompts before the others."""
    rows = [*range(9), *range(10, 14), 9]
    scores, experts = [], []
    for calls in steps:
        parts = [call.logits_NE.softmax(dim=-1).topk(K) for call in calls]
        scores.append(np.stack([of.values.numpy() for of in parts], axis=1)[rows])
        experts.append(np.stack([of.indices.numpy() for of in parts], axis=1)[rows])
    return np.concatenate(scores), np.concatenate(experts)


def test_a_trace_has_the_routers_choices_and_the_phases(tmp_path: Path) -> None:
    """With scores of all tokens, though half of the pairs were dropped."""
    recorded = Recorded(tmp_path / "new/trace.npz")
    following = dataclasses.replace(MIXED, requests=("d", "b", "e"), computed=(0, 13, 3))
    steps = []
    for step in (MIXED, following):
        steps.append(recorded.compute(step))
        recorded.compute(step, layers=1)  # broken off, and left out
    trace = recorded.trace()
    score_TLK, expert_TLK = routed(steps)
    np.testing.assert_allclose(trace.score_TLK, score_TLK, rtol=1e-6)
    np.testing.assert_array_equal(trace.expert_TLK, expert_TLK)
    assert trace.step_T.tolist() == [0] * 13 + [1] + [4] * 13 + [5]
    assert trace.decode_S.tolist() == [False, True, False, True]
    assert (trace.n_experts, trace.model, trace.source) == (E, "toy", "a test")
    assert trace.layers == ("layers.0", "layers.1")


@pytest.mark.parametrize(("decode", "steps"), [("constrained", [False]), ("only", [True, False])])
def test_a_step_of_both_phases_counts_as_one_of_prompts(
    decode: str, steps: list[bool], tmp_path: Path
) -> None:
    recorded = Recorded(tmp_path / "trace.npz", decode=decode)
    recorded.compute(MIXED)
    assert recorded.trace().decode_S.tolist() == steps


def test_a_file_has_half_of_the_tokens_at_any_time(tmp_path: Path) -> None:
    """vLLM kills its workers, by default."""
    recorded = Recorded(tmp_path / "trace.npz")
    sizes = set()
    for number in range(1, 20):
        recorded.compute(MIXED)
        recorded.compute(MIXED, layers=1)  # broken off
        tokens = load_trace(recorded.path).n_tokens
        assert tokens is not None
        assert 2 * tokens > MIXED.n_rows * number
        sizes.add(tokens)
    assert len(sizes) == 5, "written at 1, 2, 4, 8 and 16 steps, and not at each"
    assert recorded.trace().n_tokens == 19 * MIXED.n_rows


def test_a_trace_ends_with_the_step_that_reaches_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded(tmp_path / "trace.npz", limit=20)
    assert capsys.readouterr().err == f"capmoe_eval: writes a trace to {recorded.path}\n"
    for _ in range(4):
        recorded.compute(MIXED)
    message = f"capmoe_eval: wrote a trace of 28 tokens to {recorded.path}\n"
    assert capsys.readouterr().err == message
    assert not recorded.writer._parts, "the memory is free"
    trace = recorded.trace()
    assert (trace.n_tokens, trace.source) == (28, "a test, the first 28 tokens")
    assert capsys.readouterr().err == ""
    Recorded(tmp_path / "empty.npz").writer.close()
    assert "wrote no token" in capsys.readouterr().err
    assert not (tmp_path / "empty.npz").exists()


def test_a_server_goes_on_when_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_trace: Trace, path: Path) -> None:
        raise UnwritableError(f"trace={path}: cannot be written")

    recorded = Recorded(tmp_path / "trace.npz")
    monkeypatch.setattr(module, "save_trace", fail)
    for _ in range(3):
        recorded.compute(MIXED)
    recorded.writer.close()
    _, message = capsys.readouterr().err.splitlines()
    line = f"capmoe_eval: writes no trace any more: trace={recorded.path}: cannot be written"
    assert message == line


def _serve(path: Path) -> None:
    recorded = Recorded(path)
    for _ in range(3):
        recorded.compute(MIXED)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_that_ends_writes_the_rest(method: str, tmp_path: Path) -> None:
    """Also one that was forked, which leaves out what `atexit` should call."""
    worker = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=_serve, args=(tmp_path / "trace.npz",)
    )
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert load_trace(tmp_path / "trace.npz").n_tokens == 3 * MIXED.n_rows


def test_every_worker_has_a_file_of_its_own_where_files_can_be_written(tmp_path: Path) -> None:
    paths = {new_trace_path(tmp_path, "allenai/OLMoE-1B-7B-0924") for _ in range(20)}
    assert len(paths) == 20
    assert all(path.parent == tmp_path for path in paths)
    assert all(path.name.startswith("OLMoE-1B-7B-0924_") for path in paths)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^CAPMOE_TRACE=[^\n]*file/traces[^\n]*$"):
        install(create_method("score", 0.5), tmp_path / "file/traces")
