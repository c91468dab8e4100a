"""EMULATED timing: every rank's work in turn on one device, and a stated all-to-all.

What is measured: gate, decision, packing, experts, combination and shared experts of each rank,
alone on the device; the slowest rank counts, as it would between two exchanges. What is not: the
exchanges. They take ``latency + bytes / bandwidth`` of the rank that sends or receives most
(:func:`capmoe_eval.bench.ep.link.exchange_seconds`).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from capmoe_eval.bench.ep.clock import Clock, from_ends, untimed
from capmoe_eval.bench.ep.layer import (
    LayerSetting,
    Router,
    SharedExperts,
    finished,
    random_experts,
    rank_tokens,
    shared_experts,
)
from capmoe_eval.bench.ep.link import Machine, exchange_seconds
from capmoe_eval.bench.ep.timing import Pass, load_of, phases_of
from capmoe_eval.experiment.timings.schema import Link, Load
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel.dispatch import Exchange, run_experts

_BEFORE = ("gate", "decide", "permute")
_PASSES = 3  # over which the device's speed is measured, after one that warms up
_STATED_BYTES = 2  # of a value on a stated machine: bfloat16


class EmulatedLayer:
    """An MoE layer whose ranks take turns in one process.

    Attributes:
        setting: The layer. With the same setting and logits, the numbers are those of
            :class:`capmoe_eval.bench.ep.timing.RankedLayer`.
        link: How long the exchanges are taken to be.

    Args:
        setting: The layer.
        logits: Router logits [T·R, E] of the tokens of all ranks.
        link: How long the exchanges are taken to be.
    """

    def __init__(self, setting: LayerSetting, logits: Tensor, link: Link) -> None:
        self.setting = setting
        self.link = link
        self._experts, self._shared = _weights(setting)
        self._route(logits)

    def rerouted(self, logits: Tensor) -> EmulatedLayer:
        """Return a layer with the same weights and another routing."""
        other = copy.copy(self)
        other._route(logits)
        return other

    def _route(self, logits: Tensor) -> None:
        setting = self.setting
        self._tokens = [rank_tokens(setting, logits, rank) for rank in range(setting.ranks)]
        # Expert Drop's load is that of the whole batch, whoever asks.
        chosen = logits.topk(setting.shape.top_k, dim=1).indices.reshape(-1)
        load_E = torch.bincount(chosen, minlength=setting.shape.n_experts).to(setting.device)
        self._router = Router(setting, lambda _own: load_E)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer rank by rank."""
        clocks = [Clock(self.setting.device) for _ in self._tokens]
        routed = []
        for tokens, clock in zip(self._tokens, clocks, strict=True):
            clock.wait()
            routed.append(self._router(tokens, method, clock.lap))
        counts_RRL = torch.stack([one.packed.counts_RL for one in routed])  # [source, rank, L]
        pairs_RR = counts_RRL.sum(dim=2).cpu()
        parts = [
            torch.split(one.packed.rows_PH, pairs)
            for one, pairs in zip(routed, pairs_RR.tolist(), strict=True)
        ]
        done = []
        for rank, clock in enumerate(clocks):
            arrived_AH = torch.cat([part[rank] for part in parts])
            received = pairs_RR[:, rank].tolist()
            exchange = Exchange(counts_RRL[:, rank], [], received)
            clock.wait()
            with clock.lap("experts"):
                done_AH = run_experts(self._experts[rank], arrived_AH, exchange)
            done.append(torch.split(done_AH, received))
        outputs = []
        for rank, clock in enumerate(clocks):
            rows_PH = torch.cat([there[rank] for there in done])
            clock.wait()
            hidden_TH = self._tokens[rank].hidden_TH
            outputs.append(finished(rows_PH, routed[rank], hidden_TH, self._shared, clock.lap))
        spent = [clock.seconds() for clock in clocks]
        return Pass(self._seconds(spent, pairs_RR), torch.cat(outputs))

    def _seconds(self, spent: Sequence[dict[str, float]], pairs_RR: Tensor) -> dict[str, float]:
        """Put the ranks' times together: an exchange begins when the last rank is ready for it."""
        bytes_RR = pairs_RR * self.setting.row_bytes
        phases = phases_of(self.setting.shape)
        after = phases[phases.index("return") + 1 :]
        ends = _slowest(spent, _BEFORE, 0.0)
        # Before the rows go the counts, in an exchange of their own.
        ends.append(ends[-1] + self.link.latency + exchange_seconds(self.link, bytes_RR))
        ends += _slowest(spent, ("experts",), ends[-1])
        ends.append(ends[-1] + exchange_seconds(self.link, bytes_RR.T))
        ends += _slowest(spent, after, ends[-1])
        return from_ends(phases, ends)

    @torch.no_grad()
    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed, over all ranks."""
        routed = [self._router(tokens, method, untimed) for tokens in self._tokens]
        counts_RRL = torch.stack([one.packed.counts_RL for one in routed])
        pairs_RR = counts_RRL.sum(dim=2)
        return load_of(
            counts_RRL.sum(dim=0),
            sum(one.dropped for one in routed),
            int(pairs_RR.sum() - pairs_RR.diagonal().sum()),
            self.setting,
            self._tokens[0],
        )


@lru_cache(maxsize=1)  # a study times many routings of one layer
def _weights(setting: LayerSetting) -> tuple[list[nn.Module], SharedExperts | None]:
    """Return every rank's experts, and the shared ones."""
    experts = [random_experts(setting, rank) for rank in range(setting.ranks)]
    return experts, shared_experts(setting)


def _slowest(spent: Sequence[dict[str, float]], phases: Sequence[str], begun: float) -> list[float]:
    """Return when the last rank has finished each of some phases, if all begin together."""
    return [
        begun + max(sum(own[phase] for phase in phases[: n + 1]) for own in spent)
        for n in range(len(phases))
    ]


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
