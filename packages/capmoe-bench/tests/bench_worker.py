"""One rank: times a layer and a prefill, and runs the benchmark as a command."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_runs import QUICK
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.ranks import World
from test_timing import CPU, METHODS, setting
from torch import Tensor

from capmoe_bench.benchmarks import main as bench
from capmoe_bench.ep.measure import TimedPrefill
from capmoe_bench.ep.skew import Skew
from capmoe_bench.ep.timing import PHASES, RankedLayer, measured_link


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    world = World.join(CPU, timeout=timedelta(seconds=45))
    torch.save(_timed(world), directory / f"timed-{world.rank}.pt")
    with suppress(SystemExit):  # a failure leaves no file
        bench([*QUICK, "--validate", "--out", str(directory / "bench")])
    dist.barrier()


def _timed(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Time a layer and a prefill; return what the layer computes and sends under every method."""
    timed = RankedLayer(setting(), Skew(2.5).logits(40, 8, 2, layer=4), world)
    methods = METHODS | {"dropless": create_method("baseline")}
    outputs = {name: timed.run(method).output_TH for name, method in methods.items()}
    loads = {name: vars(timed.load(method)) for name, method in methods.items()}
    seconds = dict(timed.run(create_method("baseline")).seconds)
    total = seconds.pop("total")
    assert tuple(seconds) == PHASES
    assert total > 0
    assert abs(sum(seconds.values()) - total) < 1e-9
    link = measured_link(world, CPU, repeats=2)
    assert link.latency > 0
    assert link.bandwidth > 0
    assert "measured" in link.source
    layers = [RankedLayer(setting(), Skew(2.5).logits(40, 8, 2), world) for _ in range(2)]
    prefill = TimedPrefill(layers, 20, 5)
    written = [prefill.run(methods[name]) for name in ("dropless", "score", "dropless")]
    assert written[0].output_TH.shape[:2] == (4, 1)
    assert set(written[0].seconds) == {"total"}
    assert torch.equal(written[0].output_TH, written[2].output_TH)
    assert not torch.equal(written[0].output_TH, written[1].output_TH)
    return outputs, loads
