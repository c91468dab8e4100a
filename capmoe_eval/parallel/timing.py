"""How long one MoE layer takes over ranks, phase by phase.

Two ways: :class:`RankedLayer`, on real processes, and
:class:`capmoe_eval.parallel.emulation.EmulatedLayer`, in one. Both give the same :class:`Pass`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from capmoe_eval.method import Method
from capmoe_eval.parallel.dispatch import announce, run_experts, send_back, send_rows
from capmoe_eval.parallel.layer import (
    Lap,
    LayerShape,
    RankTokens,
    Routed,
    Router,
    combined,
    random_experts,
    rank_tokens,
)
from capmoe_eval.parallel.world import World

PHASES = ("gate", "decide", "permute", "dispatch", "experts", "return", "combine")
"""What a layer consists of; Figure 6 shows the first two, and the two exchanges, as one each."""


class Clock:
    """Times named phases of one pass, each waited for by the device and by all ranks.

    Args:
        device: Where the work is done.
        barrier: Waits for all ranks; None where there is one process.
    """

    def __init__(self, device: torch.device, barrier: Callable[[], None] | None = None) -> None:
        self._device = device
        self._barrier = barrier
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def lap(self, phase: str) -> Iterator[None]:
        """Time a block and add it to the phase."""
        self._wait()
        if self._barrier is not None:
            self._barrier()
        started = time.perf_counter()
        yield
        self._wait()
        spent = time.perf_counter() - started
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def untimed(_phase: str) -> Iterator[None]:
    """Stand in for :meth:`Clock.lap` where a pass is timed as a whole."""
    yield


@dataclass(frozen=True)
class Pass:
    """One pass through the layer.

    Attributes:
        seconds: Of every phase and of the ``total``, on the slowest rank.
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
    """

    kept: int
    dropped_share: float
    expert_load: list[int]
    rank_load: list[int]
    sent_bytes: int


class Layer(Protocol):
    """A layer that can be timed under a method."""

    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer once."""

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed."""


class RankedLayer:
    """An MoE layer over real processes, each with its experts and tokens.

    Every process makes one and calls the same methods. A pass runs twice: phase by phase with a
    barrier before each, and as a whole with one barrier, which is the total.

    Args:
        shape: The layer.
        logits: Router logits [T·R, E] of the tokens of all ranks.
        world: The processes.
        device: Where this one computes.
        dtype: Precision.
        seed: Seed of weights and hidden states.
    """

    def __init__(
        self,
        shape: LayerShape,
        logits: Tensor,
        world: World,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.world = world
        self._shape = shape
        self._device = device
        self._router = Router(shape, world.size, device=device, dtype=dtype, total=world.total)
        self._experts = random_experts(
            shape, world.size, world.rank, device=device, dtype=dtype, seed=seed
        )
        self._tokens = rank_tokens(
            shape, logits, world.size, world.rank, device=device, dtype=dtype, seed=seed
        )

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer, and return the slowest rank's times."""
        phases, whole = Clock(self._device, self.barrier), Clock(self._device, self.barrier)
        self.forward(method, phases.lap)
        with whole.lap("total"):
            output_TH = self.forward(method, untimed)
        seconds = phases.seconds | whole.seconds
        return Pass(slowest(seconds, self.world, self._device), output_TH)

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
        with lap("combine"):
            return combined(rows_PH, routed)

    @torch.no_grad()
    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed, over all ranks."""
        world = self.world
        routed = self._router(self._tokens, method, untimed)
        counts_RL, kept, dropped, sent = world.totals(
            routed.packed.counts_RL, *_counts(routed, world.rank, self._device)
        )
        return load_of(counts_RL, int(kept), int(dropped), int(sent), self._shape, self._tokens)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.world.group)


def slowest(seconds: Mapping[str, float], world: World, device: torch.device) -> dict[str, float]:
    """Return the times of the slowest rank, each part on its own."""
    own = torch.tensor(list(seconds.values()), dtype=torch.float64, device=device)
    return dict(zip(seconds, world.highest(own).tolist(), strict=True))


def _counts(routed: Routed, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    counts_R = routed.packed.counts_RL.sum(dim=1)
    sent = int(counts_R.sum() - counts_R[rank])
    return tuple(torch.tensor(n, device=device) for n in (routed.kept, routed.dropped, sent))


def load_of(
    counts_RL: Tensor, kept: int, dropped: int, sent: int, shape: LayerShape, tokens: RankTokens
) -> Load:
    """Return the load of all ranks from sums over them."""
    row_bytes = shape.hidden * tokens.hidden_TH.element_size()
    return Load(
        kept=kept,
        dropped_share=dropped / (tokens.groups.n_tokens * shape.top_k),
        expert_load=counts_RL.reshape(-1).tolist(),
        rank_load=counts_RL.sum(dim=1).tolist(),
        sent_bytes=sent * row_bytes,
    )


_GAIN = 1.05  # an ideal speedup below has no share that could be told from noise


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the median and the quartiles of some values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


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
    everyone = {"dropless": Method("baseline"), **methods}
    rounds: dict[str, list[Mapping[str, float]]] = {name: [] for name in everyone}
    for number in range(warmup + repeats):
        for name, method in everyone.items():
            seconds = layer.run(method).seconds
            if number >= warmup:
                rounds[name].append(seconds)
    loads = {name: layer.load(method) for name, method in everyone.items()}
    dropless, full = rounds["dropless"], loads["dropless"]
    timings = {}
    for name, passes in rounds.items():
        load = loads[name]
        speedup = Spread.of(
            [b["total"] / own["total"] for b, own in zip(dropless, passes, strict=True)]
        )
        ideal_rank = max(full.rank_load) / max(1, *load.rank_load)
        timings[name] = Timing(
            seconds={part: Spread.of([p[part] for p in passes]) for part in passes[0]},
            speedup=speedup,
            load=load,
            ideal_expert=max(full.expert_load) / max(1, *load.expert_load),
            ideal_rank=ideal_rank,
            reached=(speedup.median - 1) / (ideal_rank - 1) if ideal_rank > _GAIN else None,
        )
    return timings


def measured_link(world: World, device: torch.device, *, repeats: int = 20) -> tuple[float, float]:
    """Measure an all-to-all between the processes.

    Returns:
        Its latency in seconds, from tiny messages, and its bandwidth in bytes per second and rank,
        from large ones.
    """

    def seconds(rows: int) -> float:
        sent = torch.zeros(rows * world.size, 256, device=device)
        got = torch.empty_like(sent)
        spent = []
        for _ in range(repeats + 2):
            clock = Clock(device, lambda: dist.barrier(group=world.group))
            with clock.lap("exchange"):
                dist.all_to_all_single(got, sent, group=world.group)
            spent.append(clock.seconds["exchange"])
        own = torch.tensor(statistics.median(spent[2:]), dtype=torch.float64, device=device)
        return float(world.highest(own))

    small, large, rows = seconds(1), seconds(4096), 4096
    outgoing = rows * 256 * 4 * (world.size - 1)
    return small, outgoing / max(large - small, 1e-9)
