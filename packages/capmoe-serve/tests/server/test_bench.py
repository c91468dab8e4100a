"""`bench server` splits a step's time, puts everything back, and needs vLLM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from bench_runs import bench
from capmoe_bench.timings import read_evaluation, targets

from capmoe_serve.bench import server
from server.engines import NEEDS_VLLM
from server.stand_ins import Served
from tests.conftest import REPOSITORY


def test_without_vllm_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert bench(tmp_path, "server") == (2, {})
    assert "make install-server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [("wides", "did you mean 'wide'?"), ("real:nobody", "`make real` writes it")],
)
def test_a_model_that_is_not_there_is_refused(
    model: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "server", "--models", model) == (2, {})
    assert message in capsys.readouterr().err


def test_the_parts_of_a_step_are_timed_and_put_back() -> None:
    served = Served("score", 0.5, layers=1)
    with server.timed(served.capacity) as times:
        served.compute()
    seconds = dict(times)
    assert seconds.keys() == {"plans", "end", "stock_route", "emit", "route"}
    assert seconds["route"] > seconds["stock_route"] > 0
    served.compute()
    assert times == seconds


@NEEDS_VLLM
@pytest.mark.slow
def test_every_side_of_a_real_engine_is_timed(tmp_path: Path) -> None:
    sizes = ["--batch", "4", "--prompt", "32", "--new", "3", "--layers", "1", "--scale", "16"]
    words = ["server", *sizes, "--rounds", "1", "--warmup", "1", "--out", str(tmp_path)]
    # The plugin stays in the process of a benchmark, and other tests ask for engines without it.
    program = [sys.executable, "-m", "capmoe_eval", "bench", *words]
    subprocess.run(program, cwd=REPOSITORY, check=True, capture_output=True)
    file = read_evaluation(tmp_path / "server.json")
    names = [target.name for target in targets(file)]
    assert len(names) == len(set(names)) == 2 * 2 * len(server.SIDES) * 3
    with_goal = [target for target in targets(file) if target.target is not None]
    assert [server.AT_INFINITY in target.name for target in with_goal] == [True] * 4
    for details in file["models"].values():
        shares = details["prefill"]["dropped_share"]
        assert shares["γ=∞"] == 0 < shares["γ=1"] < shares["γ=0.5"]
