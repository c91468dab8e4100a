"""How long one MoE layer takes over ranks, phase by phase.

Two ways: :class:`RankedLayer`, on real processes, and
:class:`capmoe_eval.parallel.emulation.EmulatedLayer`, in one. Both give the same :class:`Pass`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from capmoe_eval.method import Method
from capmoe_eval.parallel.clock import Clock, from_ends, untimed
from capmoe_eval.parallel.dispatch import announce, run_experts, send_back, send_rows
from capmoe_eval.parallel.layer import (
    Lap,
    LayerSetting,
    LayerShape,
    RankTokens,
    Routed,
    Router,
    finished,
    random_experts,
    rank_tokens,
    shared_experts,
)
from capmoe_eval.parallel.world import World
from capmoe_eval.spread import Spread

PHASES = ("gate", "decide", "permute", "dispatch", "experts", "return", "combine", "shared")
"""What a layer consists of, in order; Figure 6 shows the first two, and the exchanges, as one."""


def phases_of(shape: LayerShape) -> tuple[str, ...]:
    """Return a layer's phases: ``shared`` only where it has shared experts."""
    return PHASES if shape.shared else PHASES[:-1]


@dataclass(frozen=True)
class Pass:
    """One pass through the layer.

    Attributes:
        seconds: Of every phase and of the ``total``, their sum: a phase lasts from when the last
            rank finished the one before to when the last rank finished it.
        output_TH: This rank's output (of all ranks, where they are emulated).
    """

    seconds: Mapping[str, float]
    output_TH: Tensor


@dataclass(frozen=True)
class Load:
    """What a method leaves to be sent and computed, over all ranks.

    Attributes:
        kept: Pairs that are computed.
        dropped_share: Pairs of the tokens' own top-k that are not, as a share of all.
        expert_load: Pairs of every expert.
        rank_load: Pairs of every rank's experts.
        sent_bytes: Bytes that leave any rank in the first all-to-all; as many come back.
        fullest_expert: Pairs of the fullest expert; of several layers, the sum of each one's own.
        fullest_rank: The same of the rank with most.
    """

    kept: int
    dropped_share: float
    expert_load: list[int]
    rank_load: list[int]
    sent_bytes: int
    fullest_expert: int
    fullest_rank: int


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


class Layer(Protocol):
    """A layer that can be timed under a method."""

    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer once."""

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed."""


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
        self._router = Router(setting, world.total)
        self._experts = random_experts(setting, world.rank)
        self._shared = shared_experts(setting)
        self._tokens = rank_tokens(setting, logits, world.rank)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer."""
        clock = Clock(self.setting.device)
        self.begin(clock)
        output_TH = self.forward(method, clock.lap)
        return Pass(together(clock, self.world), output_TH)

    def begin(self, clock: Clock) -> None:
        """Wait for all ranks and start the clock."""
        clock.wait()
        dist.barrier(group=self.world.group)
        clock.start()

    def forward(self, method: Method, lap: Lap, hidden_TH: Tensor | None = None) -> Tensor:
        """Return the layer's output for this rank's tokens [T, H].

        Args:
            method: The method.
            lap: Times each phase.
            hidden_TH: Hidden states in place of the layer's own random ones.
        """
        tokens = self._tokens
        if hidden_TH is not None:
            tokens = dataclasses.replace(tokens, hidden_TH=hidden_TH)
        group = self.world.group
        routed = self._router(tokens, method, lap)
        with lap("dispatch"):
            exchange = announce(routed.packed.counts_RL, group)
            arrived_AH = send_rows(routed.packed.rows_PH, exchange, group)
        with lap("experts"):
            done_AH = run_experts(self._experts, arrived_AH, exchange)
        with lap("return"):
            rows_PH = send_back(done_AH, exchange, group)
        return finished(rows_PH, routed, tokens.hidden_TH, self._shared, lap)

    @torch.no_grad()
    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed, over all ranks."""
        world = self.world
        routed = self._router(self._tokens, method, untimed)
        counts_RL, kept, dropped, sent = world.totals(
            routed.packed.counts_RL, *_counts(routed, world.rank, self.setting.device)
        )
        return load_of(counts_RL, int(kept), int(dropped), int(sent), self.setting, self._tokens)


def together(clock: Clock, world: World) -> dict[str, float]:
    """Return the phases of all ranks, given this one's clock: each ends with the last rank."""
    ends = clock.ends()
    own = torch.tensor(list(ends.values()), dtype=torch.float64, device=clock.device)
    return from_ends(list(ends), world.highest(own).tolist())


def _counts(routed: Routed, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    counts_R = routed.packed.counts_RL.sum(dim=1)
    sent = int(counts_R.sum() - counts_R[rank])
    return tuple(torch.tensor(n, device=device) for n in (routed.kept, routed.dropped, sent))


def load_of(
    counts_RL: Tensor, kept: int, dropped: int, sent: int, setting: LayerSetting, tokens: RankTokens
) -> Load:
    """Return the load of all ranks from sums over them."""
    expert_load, rank_load = counts_RL.reshape(-1).tolist(), counts_RL.sum(dim=1).tolist()
    return Load(
        kept=kept,
        dropped_share=dropped / (tokens.groups.n_tokens * setting.shape.top_k),
        expert_load=expert_load,
        rank_load=rank_load,
        sent_bytes=sent * setting.row_bytes,
        fullest_expert=max(expert_load),
        fullest_rank=max(rank_load),
    )


_GAIN = 1.05  # an ideal speedup below has no share that could be told from noise


@dataclass(frozen=True)
class Timing:
    """A method's times and what it gains over dropless routing.

    Attributes:
        seconds: Of every phase and of the total.
        speedup: Of the total, over the dropless pass of the same round.
        load: What is sent and computed.
        ideal_expert: The fullest expert's load before over that after: N_max / max(C, …), the
            speedup of a rank with one expert that does nothing else.
        ideal_rank: The same of the fullest rank's experts together.
        reached: How much of the gain of ``ideal_rank`` the speedup has; None if that is too small.
    """

    seconds: dict[str, Spread]
    speedup: Spread
    load: Load
    ideal_expert: float
    ideal_rank: float
    reached: float | None


def time_methods(
    layer: Layer, methods: Mapping[str, Method], *, repeats: int = 10, warmup: int = 3
) -> dict[str, Timing]:
    """Time a layer under several methods, in turn, and dropless beside them.

    Every round passes through the layer once under each method, so that what disturbs the machine
    disturbs all of them; a speedup is taken within a round.

    Args:
        layer: The layer.
        methods: Methods by a name; ``dropless`` is added in front.
        repeats: Rounds.
        warmup: Rounds before them that are not counted.

    Returns:
        The timing of every method and of ``dropless``.
    """
    return time_beside([layer], methods, repeats=repeats, warmup=warmup)[0]


def time_beside(
    layers: Sequence[Layer], methods: Mapping[str, Method], *, repeats: int, warmup: int
) -> list[dict[str, Timing]]:
    """Time several layers as :func:`time_methods` does one, all in every round."""
    everyone = {"dropless": Method("baseline"), **methods}
    rounds: list[dict[str, list[Mapping[str, float]]]] = [
        {name: [] for name in everyone} for _ in layers
    ]
    for number in range(warmup + repeats):
        for name, method in everyone.items():
            for layer, passes in zip(layers, rounds, strict=True):
                seconds = layer.run(method).seconds
                if number >= warmup:
                    passes[name].append(seconds)
    return [
        _timings(passes, {name: layer.load(method) for name, method in everyone.items()})
        for layer, passes in zip(layers, rounds, strict=True)
    ]


def _timings(
    rounds: Mapping[str, list[Mapping[str, float]]], loads: Mapping[str, Load]
) -> dict[str, Timing]:
    """Put passes together; speedups are those over dropless."""
    dropless, full = rounds["dropless"], loads["dropless"]
    timings = {}
    for name, passes in rounds.items():
        load = loads[name]
        speedup = Spread.of(
            [b["total"] / own["total"] for b, own in zip(dropless, passes, strict=True)]
        )
        ideal_rank = full.fullest_rank / max(1, load.fullest_rank)
        timings[name] = Timing(
            seconds={part: Spread.of([p[part] for p in passes]) for part in passes[0]},
            speedup=speedup,
            load=load,
            ideal_expert=full.fullest_expert / max(1, load.fullest_expert),
            ideal_rank=ideal_rank,
            reached=(speedup.median - 1) / (ideal_rank - 1) if ideal_rank > _GAIN else None,
        )
    return timings
