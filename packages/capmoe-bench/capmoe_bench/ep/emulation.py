"""EMULATED timing: all ranks in turn on one device, a stated all-to-all.

Gate, decision, packing, experts, combination and shared experts of each rank are measured, alone on
the device; the slowest rank counts, as it would between two exchanges. The exchanges are not run:
they take ``latency + bytes / bandwidth`` of the rank that sends or receives most.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from capmoe_eval.routing.decision import LayerContext, Scores, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.parallel import Exchange, run_experts
from capmoe_eval.wrapper.ranks import ALONE
from torch import Tensor

from capmoe_bench.ep.layer import LayerSetting, Rank, Total, layer_weights
from capmoe_bench.ep.studies import Link
from capmoe_bench.ep.timing import Clock, PairLoad, Pass, from_ends, load_of

_PASSES = 3  # over which the device's speed is measured, after one that warms up
_STATED_BYTES = 2  # of a value on a stated machine: bfloat16

NODE = Link(200e9, 20e-6, "stated")
"""An all-to-all within a node of GPUs."""


def exchange_seconds(link: Link, bytes_RR: Tensor) -> float:
    """Return the time of an exchange of bytes [R, R] from each rank to each; what stays is free."""
    moving_RR = bytes_RR.double().clone().fill_diagonal_(0)
    busiest = max(float(moving_RR.sum(dim=dim).max()) for dim in (0, 1))
    return link.latency + busiest / link.bandwidth


@dataclass(frozen=True)
class ReferenceMachine:
    """A machine whose communication is to be emulated on a slower device."""

    name: str  # for the file
    flops: float  # operations per second that its experts' kernel reaches in bfloat16
    bandwidth: float  # bytes per second that a rank sends, and at the same time receives
    latency: float  # seconds of an exchange of nothing

    @property
    def balance(self) -> float:
        """Bytes that it can send in the time of one floating-point operation."""
        return self.bandwidth / self.flops


# NVLink of both: 450 GB/s per direction. Peak of dense bfloat16: 148 and 989 TFLOP/s, of which a
# grouped product reaches some 80 and 60 %. 20 µs is what an all-to-all of nothing takes in NCCL.
MACHINES = {
    "h20": ReferenceMachine("H20", 120e12, 450e9, 20e-6),
    "h100": ReferenceMachine("H100 SXM", 600e12, 450e9, 20e-6),
}
"""The paper measured on eight H20; an H100 computes faster over the same link."""


class EmulatedLayer:
    """An MoE layer whose ranks take turns in one process; they compute what real ranks do."""

    def __init__(self, setting: LayerSetting, logits: Tensor, link: Link) -> None:
        self.setting, self._link, self._logits_TE = setting, link, logits
        self._totals = functools.cache(self._whole_batch)
        experts, shared = layer_weights(setting, tuple(range(setting.ranks)))
        self._ranks = [
            Rank(setting, logits, number, module, shared, self._total)
            for number, module in enumerate(experts)
        ]

    def _total(self, method: Method) -> Total:
        """Return what gives a rank the sums over all ranks, in the order in which it asks."""
        number = itertools.count()
        return lambda _count: self._totals(method)[next(number)]

    def _whole_batch(self, method: Method) -> list[Tensor]:
        """Return what the decision for the tokens of all ranks together sums over them."""
        size, totals = self.setting.ranks, list[Tensor]()

        def total(count: Tensor) -> Tensor:
            totals.append(count.to(self.setting.device))
            return count

        score_TE = self._logits_TE.softmax(dim=1, dtype=torch.float32)
        topk_TK = score_TE.topk(self.setting.shape.top_k, dim=1).indices
        counted = torch.ones(size, len(score_TE) // size, dtype=torch.bool)
        groups = group_tokens(counted, ep_size=size)
        top_k, n_experts = topk_TK.shape[1], score_TE.shape[1]
        context = LayerContext.of(method, groups, top_k=top_k, n_experts=n_experts, total=total)
        method.decide(Scores(score_TE, topk_TK), groups, context)
        return totals

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer rank by rank."""
        clocks = [Clock(self.setting.device) for _ in self._ranks]
        routed = []
        for rank, clock in zip(self._ranks, clocks, strict=True):
            clock.wait()
            routed.append(rank.route(method, clock.lap))
        counts_RRL = torch.stack(
            [tokens.packed.counts_RL for tokens in routed]
        )  # [source, rank, L]
        pairs_RR = counts_RRL.sum(dim=2).cpu()
        parts = [
            torch.split(tokens.packed.rows_PH, pairs)
            for tokens, pairs in zip(routed, pairs_RR.tolist(), strict=True)
        ]
        done = []
        for number, clock in enumerate(clocks):
            arrived_AH = torch.cat([part[number] for part in parts])
            received = pairs_RR[:, number].tolist()
            exchange = Exchange(counts_RRL[:, number], [], received)
            clock.wait()
            with clock.lap("experts"):
                done_AH = run_experts(self._ranks[number].experts, arrived_AH, exchange)
            done.append(torch.split(done_AH, received))
        outputs = []
        for number, clock in enumerate(clocks):
            rows_PH = torch.cat([there[number] for there in done])
            clock.wait()
            outputs.append(self._ranks[number].finish(rows_PH, routed[number], clock.lap))
        spent = [clock.seconds() for clock in clocks]
        return Pass(self._seconds(spent, pairs_RR), torch.cat(outputs))

    def load(self, method: Method) -> PairLoad:
        """Return the pairs that the method leaves to be sent and computed, over all ranks."""
        return load_of(self._ranks, method, ALONE)

    def _seconds(self, spent: Sequence[dict[str, float]], pairs_RR: Tensor) -> dict[str, float]:
        """Put the ranks' times together: an exchange begins when the last rank is ready for it."""
        link, bytes_RR = self._link, pairs_RR * self.setting.row_bytes
        ends = _slowest(spent, ("gate", "decide", "permute"), 0.0)
        # Before the rows go the counts, in an exchange of their own.
        ends["dispatch"] = ends["permute"] + link.latency + exchange_seconds(link, bytes_RR)
        ends |= _slowest(spent, ("experts",), ends["dispatch"])
        ends["return"] = ends["experts"] + exchange_seconds(link, bytes_RR.T)
        after = [phase for phase in ("combine", "shared") if phase in spent[0]]
        return from_ends(ends | _slowest(spent, after, ends["return"]))


def _slowest(
    spent: Sequence[Mapping[str, float]], phases: Sequence[str], begun: float
) -> dict[str, float]:
    """Return when the last rank has finished each of some phases, if all begin together."""
    ends = np.cumsum([[of_rank[phase] for phase in phases] for of_rank in spent], axis=1).max(
        axis=0
    )
    return dict(zip(phases, (begun + ends).tolist(), strict=True))


def balanced(layer: EmulatedLayer, machine: ReferenceMachine, *, width: int, tokens: float) -> Link:
    """Return a link that leaves communication and computation in a machine's proportion.

    The speed of the experts is measured on this device, dropless. The exchanges take the same share
    of the experts' time as on the machine at full size and in bfloat16. So the link is as much
    slower than the machine's as the device is, with three corrections:

    - a row has fewer bytes or more;
    - an expert's work per row is smaller by the width;
    - for the latency, the whole work of a layer is smaller.

    ``width`` and ``tokens`` are the divisors of the layer's widths and of the number of its tokens.
    """
    setting, dropless = layer.setting, create_method("baseline")
    times = [layer.run(dropless).seconds["experts"] for _ in range(_PASSES + 1)][1:]
    busiest = max(layer.load(dropless).rank_load)
    rate = busiest * setting.shape.pair_flops / statistics.median(times)
    wide = setting.dtype.itemsize / _STATED_BYTES
    source = (
        f"balance of {machine.name}: {machine.balance:.3g} bytes per FLOP "
        f"({machine.bandwidth / 1e9:g} GB/s per direction, {machine.flops / 1e12:g} TFLOP/s in "
        f"bfloat16), {1e6 * machine.latency:g} µs; here the experts run at {rate / 1e9:.1f} "
        f"GFLOP/s in {8 * setting.dtype.itemsize} bits, widths are divided by {width}, "
        f"tokens by {tokens:g}"
    )
    return Link(
        bandwidth=machine.balance * rate * wide * width,
        latency=machine.latency * machine.flops / (rate * width**2 * tokens),
        source=source,
    )
