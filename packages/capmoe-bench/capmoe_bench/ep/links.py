"""Emulated links between ranks: stated, or in the proportion of a machine."""

import argparse
from dataclasses import dataclass, replace

import torch
from capmoe_eval.errors import UsageError, check_choice
from torch import Tensor


@dataclass(frozen=True)
class Link:
    """A model of the all-to-all between ranks."""

    bandwidth: float  # bytes per second that a rank sends, and at the same time receives
    latency: float  # seconds of an exchange of nothing
    source: str  # the origin of these two, in plain words

    def seconds(self, bytes_RR: Tensor) -> float:
        """Return the time of an exchange of bytes [R, R] from each rank to each.

        What stays on its rank is free.
        """
        moving_RR = bytes_RR.double().clone().fill_diagonal_(0)
        busiest = max(float(moving_RR.sum(dim=dim).max()) for dim in (0, 1))
        return self.latency + busiest / self.bandwidth


NODE = Link(200e9, 20e-6, "stated")
"""An all-to-all within a node of GPUs."""


MACHINES = {"h20": ("H20", 120e12), "h100": ("H100 SXM", 600e12)}
"""Machines whose communication can be emulated on a slower device: title, and the operations per
second that their experts' kernel reaches in bfloat16. The paper measured on eight H20; an H100
computes faster over the same link. Peak of dense bfloat16: 148 and 989 TFLOP/s, of which a grouped
product reaches some 80 and 60 %."""
_NVLINK = Link(450e9, 20e-6, "NVLink of both; 20 µs is an all-to-all of nothing in NCCL")


def balanced_link(
    machine: str, rate: float, dtype: torch.dtype, *, width: int, tokens: float
) -> Link:
    """Return a link that leaves communication and computation in a machine's proportion.

    The exchanges take the same share of the experts' time as on the machine at full size and in
    bfloat16. So the link is as much slower than the machine's as the device is, with three
    corrections:

    - a row has fewer bytes or more;
    - an expert's work per row is smaller by the width;
    - for the latency, the whole work of a layer is smaller.

    Args:
        machine: A key of :data:`MACHINES`.
        rate: Operations per second of the experts on this device, dropless.
        dtype: Their precision.
        width: The divisor of the layer's widths.
        tokens: The divisor of the number of its tokens.
    """
    (title, flops), there = MACHINES[machine], _NVLINK
    balance = there.bandwidth / flops  # bytes that are sent in the time of one operation
    return Link(
        bandwidth=balance * rate * dtype.itemsize / torch.bfloat16.itemsize * width,
        latency=there.latency * flops / (rate * width**2 * tokens),
        source=(
            f"balance of {title}: {balance:.3g} bytes per FLOP "
            f"({there.bandwidth / 1e9:g} GB/s per direction, {flops / 1e12:g} TFLOP/s in "
            f"bfloat16), {1e6 * there.latency:g} µs; here the experts run at {rate / 1e9:.1f} "
            f"GFLOP/s in {8 * dtype.itemsize} bits, widths are divided by {width}, "
            f"tokens by {tokens:g}"
        ),
    )


def emulated_link(arguments: argparse.Namespace, device: torch.device) -> Link | str:
    """Return the emulated link, or the key of the machine whose balance it shall have."""
    options = {"bandwidth": arguments.bandwidth, "latency": arguments.latency}
    stated = {name: value for name, value in options.items() if value is not None}
    if stated and arguments.machine:
        raise UsageError(
            "bandwidth: a link is either stated (--bandwidth, --latency) or in a machine's "
            "proportion (--machine)"
        )
    if stated or (device.type == "cuda" and not arguments.machine):
        link = replace(NODE, **stated)
        speed = f"{link.bandwidth / 1e9:g} GB/s per rank and direction, {1e6 * link.latency:g} µs"
        return replace(link, source=f"stated: {speed}")
    name: str = arguments.machine or "h20"
    check_choice("machine", name, MACHINES)
    return name
