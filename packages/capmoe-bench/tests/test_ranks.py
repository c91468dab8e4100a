"""On real ranks the timed layer computes and sends what the emulation says."""

from __future__ import annotations

import json
from pathlib import Path

import bench_worker
import pytest
import test_timing
import torch
from bench_runs import check
from tests.wrapper.parallel.processes import run_ranks

pytestmark = pytest.mark.slow  # processes of their own


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory of two ranks, and what each of them printed."""
    directory = tmp_path_factory.mktemp("ranks")
    return directory, run_ranks(bench_worker.main, directory, size=2, timeout=600)


def test_a_timed_layer_computes_and_sends_the_same(ranks: tuple[Path, list[str]]) -> None:
    directory, _ = ranks
    (first, loads), (second, same) = (
        torch.load(directory / f"timed-{rank}.pt") for rank in range(2)
    )
    timed = test_timing.layer()
    assert loads == same
    for name, method in test_timing.METHODS.items():
        together = torch.cat([first[name], second[name]])
        torch.testing.assert_close(together, timed.run(method).output, rtol=1e-4, atol=1e-5)
        assert loads[name] == vars(timed.load(method)), name


def test_the_benchmark_on_ranks_holds_the_emulation_against_them(
    ranks: tuple[Path, list[str]],
) -> None:
    directory, messages = ranks
    assert "measured on real processes (gloo)" in messages[0]
    assert messages[1] == ""
    (path,) = (directory / "bench").iterdir()
    assert path.name == "ep-small-2-measured.json"
    content = json.loads(path.read_text())
    assert content["kind"] == "measured"
    assert content["note"] is None
    run = check(content, 2)
    assert run["link"] is None
    (point,) = run["points"]
    methods = {row["method"] for row in point["prefill"]["timings"]}
    validation = point["validation"]
    assert methods == set(validation["errors"])
    assert len(methods) == 3
    assert all(row["seconds"]["total"]["median"] > 0 for row in point["prefill"]["timings"])
    assert "EMULATED" in validation["note"]
    assert validation["link"]["bandwidth"] > 0
    assert "measured" in validation["link"]["source"]
    pairs = [
        (point["timings"], validation),
        (point["prefill"]["timings"], validation["prefill"]),
    ]
    for measured, emulated in pairs:
        for ours, theirs in zip(measured, emulated["timings"], strict=True):
            assert ours["load"] == theirs["load"]
            error = emulated["errors"][ours["method"]]
            ratio = theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"]
            assert error["total"] == pytest.approx(ratio - 1)
