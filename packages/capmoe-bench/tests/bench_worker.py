"""One rank: times a layer and a prefill, and runs the benchmark as a command."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_runs import QUICK
from capmoe_eval.wrapper.ranks import World
from test_timing import DROPLESS, LOGITS_TE, METHODS, SETTING
from torch import Tensor

from capmoe_bench.benchmarks import main as bench
from capmoe_bench.ep.timing import PHASES, TimedLayer, TimedPrefill, measured_link
from capmoe_bench.rounds import CPU


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    world = World.join(CPU, timeout=timedelta(seconds=45))
    torch.save(_timed(world), directory / f"timed-{world.rank}.pt")
    with suppress(SystemExit):  # a failure leaves no file
        bench([*QUICK, "--validate", "--out", str(directory / "bench")])
    dist.barrier()


def _timed(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Time a layer and a prefill; return what the layer computes and sends under every method."""
    timed = TimedLayer(SETTING, LOGITS_TE, world)
    outputs = {name: timed.run(method).output for name, method in METHODS.items()}
    loads = {name: vars(timed.load(method)) for name, method in METHODS.items()}
    seconds = dict(timed.run(DROPLESS).seconds)
    total = seconds.pop("total")
    assert tuple(seconds) == PHASES
    assert total > 0
    assert abs(sum(seconds.values()) - total) < 1e-9
    link = measured_link(world, CPU, repeats=2)
    assert link.latency > 0
    assert link.bandwidth > 0
    assert "measured" in link.source
    prefill = TimedPrefill([timed, TimedLayer(SETTING, LOGITS_TE, world)], 20, 5)
    written = [prefill.run(METHODS[name]) for name in ("dropless", "score", "dropless")]
    assert written[0].output.shape[:2] == (4, 1)
    assert set(written[0].seconds) == {"total"}
    assert torch.equal(written[0].output, written[2].output)
    assert not torch.equal(written[0].output, written[1].output)
    return outputs, loads
