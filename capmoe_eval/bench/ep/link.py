"""Modelled time of an exchange between ranks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from capmoe_eval.bench.ep.clock import Clock
from capmoe_eval.experiment.timings.schema import Link
from capmoe_eval.wrapper.parallel.world import World

_LINK_ROWS, _LINK_COLUMNS = 8192, 256  # float32 to each rank: 8 MiB

NODE = Link(200e9, 20e-6, "stated")
"""An all-to-all within a node of GPUs."""


def exchange_seconds(link: Link, bytes_RR: Tensor) -> float:
    """Return the time of an exchange of bytes [R, R] from each rank to each; what stays is free."""
    moving_RR = bytes_RR.double().clone()
    moving_RR.fill_diagonal_(0)
    busiest = max(float(moving_RR.sum(dim=0).max()), float(moving_RR.sum(dim=1).max()))
    return link.latency + busiest / link.bandwidth


@dataclass(frozen=True)
class Machine:
    """A machine whose communication is to be emulated on a slower device.

    Attributes:
        name: For the file.
        flops: Floating-point operations per second that its experts' kernel reaches in bfloat16.
        bandwidth: Bytes per second that a rank sends, and at the same time receives.
        latency: Seconds of an exchange of nothing.
    """

    name: str
    flops: float
    bandwidth: float
    latency: float

    @property
    def balance(self) -> float:
        """Bytes that it can send in the time of one floating-point operation."""
        return self.bandwidth / self.flops


# NVLink of both: 450 GB/s per direction. Peak of dense bfloat16: 148 and 989 TFLOP/s, of which a
# grouped product reaches some 80 and 60 %. 20 µs is what an all-to-all of nothing takes in NCCL.
MACHINES = {
    "h20": Machine("H20", 120e12, 450e9, 20e-6),
    "h100": Machine("H100 SXM", 600e12, 450e9, 20e-6),
}
"""The paper measured on eight H20; an H100 computes faster over the same link."""


def measured_link(world: World, device: torch.device, *, repeats: int = 30) -> Link:
    """Measure an all-to-all between the processes, into memory that is asked for as in a layer.

    Its latency is that of tiny messages, its bandwidth that of large ones.
    """

    def seconds(rows: int) -> float:
        sent = torch.zeros(rows * world.size, _LINK_COLUMNS, device=device)
        clock = Clock(device)
        dist.barrier(group=world.group)
        clock.start()
        with clock.lap("exchange"):
            dist.all_to_all_single(torch.empty_like(sent), sent, group=world.group)
        own = torch.tensor(clock.seconds()["exchange"], dtype=torch.float64, device=device)
        return float(world.highest(own))

    # In turn, so that what disturbs the machine disturbs both.
    pairs = [(seconds(1), seconds(_LINK_ROWS)) for _ in range(repeats + 2)][2:]
    small, large = (statistics.median(of) for of in zip(*pairs, strict=True))
    outgoing = _LINK_ROWS * _LINK_COLUMNS * 4 * (world.size - 1)
    return Link(outgoing / max(large - small, 1e-9), small, "measured between the processes")
