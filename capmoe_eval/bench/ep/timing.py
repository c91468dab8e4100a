"""Time of one MoE layer over ranks, phase by phase.

Two ways: :class:`RankedLayer`, on real processes, and
:class:`capmoe_eval.bench.ep.emulation.EmulatedLayer`, in one. Both give the same :class:`Pass`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from capmoe_eval.bench.ep.clock import Clock, Lap, from_ends
from capmoe_eval.bench.ep.layer import LayerSetting, Rank, SharedExperts, random_experts
from capmoe_eval.experiment.timings.schema import Link, Load
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel.dispatch import announce, run_experts, send_back, send_rows
from capmoe_eval.wrapper.parallel.world import World

PHASES = ("gate", "decide", "permute", "dispatch", "experts", "return", "combine", "shared")
"""The phases of a layer, in order; only one with shared experts has the last. Figure 6 shows the
first two, and the exchanges, as one."""
_LINK_ROWS, _LINK_COLUMNS = 8192, 256  # float32 to each rank: 8 MiB


@dataclass(frozen=True)
class Pass:
    """One pass through the layer."""

    # Of every phase and of the ``total``, their sum: a phase lasts from when the last rank finished
    # the one before to when the last rank finished it.
    seconds: Mapping[str, float]
    output_TH: Tensor  # this rank's output (of all ranks, where they are emulated)


class Layer(Protocol):
    """A layer that can be timed under a method."""

    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer once."""

    def load(self, method: Method) -> Load:
        """Return the pairs that the method leaves to be sent and computed, over all ranks."""


class RankedLayer:
    """An MoE layer over real processes, each with its experts and tokens.

    Every process makes one and calls the same methods. A pass has one barrier, in front.

    Args:
        setting: The layer, with as many ranks as there are processes.
        logits: Router logits [T·R, E] of the tokens of all ranks.
        world: The processes.
    """

    def __init__(self, setting: LayerSetting, logits: Tensor, world: World) -> None:
        self.world = world
        self.setting = setting
        experts = random_experts(setting, world.rank)
        shared = SharedExperts(setting)
        self._rank = Rank(setting, logits, world.rank, experts, shared, world.total)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer."""
        clock = self.begun()
        output_TH = self.forward(method, clock.lap)
        return Pass(together(clock, self.world), output_TH)

    def begun(self) -> Clock:
        """Return a clock that starts when all ranks are ready."""
        clock = Clock(self.setting.device)
        clock.wait()
        dist.barrier(group=self.world.group)
        clock.start()
        return clock

    def forward(self, method: Method, lap: Lap, hidden_TH: Tensor | None = None) -> Tensor:
        """Return the layer's output for this rank's tokens [T, H].

        Args:
            method: The method.
            lap: Times each phase.
            hidden_TH: Hidden states in place of the layer's own random ones.
        """
        group = self.world.group
        routed = self._rank.route(method, lap, hidden_TH)
        with lap("dispatch"):
            exchange = announce(routed.packed.counts_RL, group)
            arrived_AH = send_rows(routed.packed.rows_PH, exchange, group)
        with lap("experts"):
            done_AH = run_experts(self._rank.experts, arrived_AH, exchange)
        with lap("return"):
            rows_PH = send_back(done_AH, exchange, group)
        return self._rank.finish(rows_PH, routed, lap)

    @torch.no_grad()
    def load(self, method: Method) -> Load:
        """Return the pairs that the method leaves to be sent and computed, over all ranks."""
        world = self.world
        routed = self._rank.route(method, nullcontext)
        own_RL = routed.packed.counts_RL
        sent = own_RL.sum() - own_RL[world.rank].sum()
        dropped = torch.tensor(routed.dropped, device=own_RL.device)
        counts_RL, dropped, sent = world.totals(own_RL, dropped, sent)
        return load_of(counts_RL, int(dropped), int(sent), self._rank)


def together(clock: Clock, world: World) -> dict[str, float]:
    """Return the phases of all ranks, given this one's clock: each ends with the last rank."""
    ends = clock.ends()
    own = torch.tensor(list(ends.values()), dtype=torch.float64, device=clock.device)
    return from_ends(dict(zip(ends, world.highest(own).tolist(), strict=True)))


def load_of(counts_RL: Tensor, dropped: int, sent: int, rank: Rank) -> Load:
    """Return the load of all ranks from sums over them.

    Args:
        counts_RL: Pairs of every expert, by rank.
        dropped: Pairs of the tokens' own top-k that are not kept.
        sent: Pairs that leave any rank.
        rank: Any rank of the layer.
    """
    expert_load, rank_load = counts_RL.reshape(-1).tolist(), counts_RL.sum(dim=1).tolist()
    return Load(
        kept=sum(expert_load),
        dropped_share=dropped / (rank.groups.n_tokens * rank.setting.shape.top_k),
        expert_load=expert_load,
        rank_load=rank_load,
        sent_bytes=sent * rank.setting.row_bytes,
        fullest_expert=max(expert_load),
        fullest_rank=max(rank_load),
    )


def summed(loads: Sequence[Load]) -> Load:
    """Return the load of several layers with as many tokens each."""
    return Load(
        kept=sum(load.kept for load in loads),
        dropped_share=sum(load.dropped_share for load in loads) / len(loads),
        expert_load=[sum(of) for of in zip(*(load.expert_load for load in loads), strict=True)],
        rank_load=[sum(of) for of in zip(*(load.rank_load for load in loads), strict=True)],
        sent_bytes=sum(load.sent_bytes for load in loads),
        fullest_expert=sum(load.fullest_expert for load in loads),
        fullest_rank=sum(load.fullest_rank for load in loads),
    )


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
