"""How long an exchange between ranks is taken to be where it is not run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from capmoe_eval.method import Method
from capmoe_eval.parallel.clock import Clock
from capmoe_eval.parallel.world import World

if TYPE_CHECKING:
    from capmoe_eval.parallel.emulation import EmulatedLayer

_PASSES = 3  # over which the device's speed is measured, after one that warms up
_LINK_ROWS, _LINK_COLUMNS = 8192, 256  # float32 to each rank: 8 MiB
_STATED_BYTES = 2  # of a value on a stated machine: bfloat16


@dataclass(frozen=True)
class Link:
    """A model of the all-to-all between ranks.

    Attributes:
        bandwidth: Bytes per second that a rank sends, and at the same time receives.
        latency: Seconds of an exchange of nothing.
        source: Where these two are from, in plain words.
    """

    bandwidth: float = 200e9
    latency: float = 20e-6
    source: str = "stated"

    def seconds(self, bytes_RR: Tensor) -> float:
        """Return the time of an exchange.

        Args:
            bytes_RR: Bytes from each rank (rows) to each rank (columns); what stays is free.
        """
        moving_RR = bytes_RR.double().clone()
        moving_RR.fill_diagonal_(0)
        busiest = max(float(moving_RR.sum(dim=0).max()), float(moving_RR.sum(dim=1).max()))
        return self.latency + busiest / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """A machine whose communication is to be emulated on a slower device.

    Attributes:
        name: What it is.
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


@dataclass(frozen=True)
class Reduction:
    """By how much a timed layer is smaller than the one that it stands for.

    Attributes:
        width: What hidden and intermediate widths were divided by.
        tokens: What the number of tokens was divided by.
    """

    width: int = 1
    tokens: float = 1.0


def balanced(layer: EmulatedLayer, machine: Machine, reduction: Reduction) -> Link:
    """Return a link that leaves communication and computation in a machine's proportion.

    The speed of the experts is measured on this device, dropless. The link is then as much slower
    than the machine's as the device is, with three corrections, so that the exchanges take the same
    share of the experts' time that they take there at full size and in bfloat16: a row of fewer
    bytes or more; an expert whose work per row is smaller by the width; and, for the latency, a
    layer whose whole work is smaller.

    Args:
        layer: The layer, on its device.
        machine: The machine.
        reduction: By how much the layer is smaller than the one it stands for.
    """
    setting, dropless = layer.setting, Method("baseline")
    times = [layer.run(dropless).seconds["experts"] for _ in range(_PASSES + 1)][1:]
    busiest = max(layer.load(dropless).rank_load)
    rate = busiest * setting.shape.pair_flops / statistics.median(times)
    wide = setting.dtype.itemsize / _STATED_BYTES
    smaller = reduction.width**2 * reduction.tokens
    said = (
        f"balance of {machine.name}: {machine.balance:.3g} bytes per FLOP "
        f"({machine.bandwidth / 1e9:g} GB/s per direction, {machine.flops / 1e12:g} TFLOP/s in "
        f"bfloat16), {1e6 * machine.latency:g} µs; here the experts run at {rate / 1e9:.1f} "
        f"GFLOP/s in {8 * setting.dtype.itemsize} bits, widths are divided by {reduction.width}, "
        f"tokens by {reduction.tokens:g}"
    )
    return Link(
        bandwidth=machine.balance * rate * wide * reduction.width,
        latency=machine.latency * machine.flops / (rate * smaller),
        source=said,
    )


def measured_link(world: World, device: torch.device, *, repeats: int = 30) -> Link:
    """Measure an all-to-all between the processes, into memory that is asked for as in a layer.

    Returns:
        Its latency, from tiny messages, and its bandwidth, from large ones.
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
