"""On real ranks the timed layer computes and sends what the emulation says."""

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_runs import QUICK, check
from capmoe_eval.wrapper.ranks import World
from test_timing import DROPLESS, LOGITS_TE, METHODS, SETTING, layer
from tests.wrapper.parallel.processes import run_ranks
from torch import Tensor

from capmoe_bench.benchmarks import main
from capmoe_bench.ep.timing import PHASES, TimedLayer, TimedPrefill, measured_link
from capmoe_bench.rounds import CPU

pytestmark = pytest.mark.slow  # processes of their own


def rank(directory: Path) -> None:
    """One rank: times a layer and a prefill, and runs the benchmark as a command."""
    torch.set_num_threads(1)
    world = World.join(CPU, timeout=timedelta(seconds=45))
    torch.save(_timed(world), directory / f"timed-{world.rank}.pt")
    with suppress(SystemExit):  # a failure leaves no file
        main([*QUICK, "--validate", "--out", str(directory / "bench")])
    dist.barrier()


def _timed(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Time a layer and a prefill; return what the layer computes and sends under every method."""
    timed = TimedLayer(SETTING, LOGITS_TE, world)
    outputs = {name: timed.run(method)[1] for name, method in METHODS.items()}
    loads = {name: timed.load(method) for name, method in METHODS.items()}
    seconds, _ = timed.run(DROPLESS)
    total = seconds.pop("total")
    assert tuple(seconds) == PHASES
    assert total > 0
    assert abs(sum(seconds.values()) - total) < 1e-9
    link = measured_link(world, CPU, repeats=2)
    assert link.latency > 0
    assert link.bandwidth > 0
    assert "measured" in link.source
    prefill = TimedPrefill([timed, TimedLayer(SETTING, LOGITS_TE, world)], 20, 5)
    (spent, first), (_, score), (_, again) = (
        prefill.run(METHODS[name]) for name in ("dropless", "score", "dropless")
    )
    assert first.shape[:2] == (4, 1)
    assert set(spent) == {"total"}
    assert torch.equal(first, again)
    assert not torch.equal(first, score)
    return outputs, loads


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory of two ranks, and what each of them printed."""
    directory = tmp_path_factory.mktemp("ranks")
    return directory, run_ranks(rank, directory, size=2, timeout=600)


def test_a_timed_layer_computes_and_sends_the_same(ranks: tuple[Path, list[str]]) -> None:
    directory, _ = ranks
    (first, loads), (second, same) = (
        torch.load(directory / f"timed-{number}.pt") for number in range(2)
    )
    timed = layer()
    assert loads == same
    for name, method in METHODS.items():
        together = torch.cat([first[name], second[name]])
        torch.testing.assert_close(together, timed.run(method)[1], rtol=1e-4, atol=1e-5)
        assert loads[name] == timed.load(method), name


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
    validation = point["validation"]
    assert "EMULATED" in validation["note"]
    assert "measured" in validation["link"]["source"]
    pairs = [(point["timings"], validation), (point["prefill"]["timings"], validation["prefill"])]
    for measured, emulated in pairs:
        for ours, theirs in zip(measured, emulated["timings"], strict=True):
            assert ours["load"] == theirs["load"]
            error = emulated["errors"][ours["method"]]
            ratio = theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"]
            assert error["total"] == pytest.approx(ratio - 1)
