"""Time of one MoE layer over ranks, phase by phase; here each rank is a process."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel import announce, run_experts, send_back, send_rows
from capmoe_eval.wrapper.ranks import Ranks, World
from torch import Tensor

from capmoe_bench.ep.layer import Lap, LayerSetting, Rank, layer_weights
from capmoe_bench.ep.studies import Link
from capmoe_bench.rounds import wait

PHASES = ("gate", "decide", "permute", "dispatch", "experts", "return", "combine", "shared")
"""The phases of a layer, in order; only one with shared experts has the last. Figure 6 shows the
first two, and the exchanges, as one."""
_LINK_ROWS, _LINK_COLUMNS = 8192, 256  # float32 to each rank: 8 MiB


class Clock:
    """Notes when each phase of a pass begins and ends, without disturbing it.

    On a GPU the marks are events in its stream, so that nothing waits between phases; elsewhere
    they are the time of day.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._origin: Any = None
        self._laps: list[tuple[str, Any, Any]] = []

    def start(self) -> None:
        """Wait until the device has nothing to do, and count from now."""
        self.wait()
        self._origin = self._mark()

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        wait(self.device)

    @contextmanager
    def lap(self, phase: str) -> Iterator[None]:
        """Note when a block begins and ends."""
        begun = self._mark()
        yield
        self._laps.append((phase, begun, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took, all its blocks together."""
        self.wait()
        spent: dict[str, float] = defaultdict(float)
        for phase, begun, ended in self._laps:
            spent[phase] += self._between(begun, ended)
        return dict(spent)

    def ends(self) -> dict[str, float]:
        """Return when each phase ended, in seconds since :meth:`start`."""
        self.wait()
        return {phase: self._between(self._origin, ended) for phase, _, ended in self._laps}

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        if self.device.type != "cuda":
            return float(ended - begun)
        return float(begun.elapsed_time(ended)) / 1e3


def from_ends(ends: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of phases that follow each other, and their sum as ``total``.

    Args:
        ends: When the last rank had finished each phase, in seconds since all of them began.
    """
    times = [0.0, *ends.values()]
    steps = zip(ends, pairwise(times), strict=True)
    return {phase: max(0.0, end - begun) for phase, (begun, end) in steps} | {"total": times[-1]}


@dataclass(frozen=True)
class Pass:
    """One pass through the layer."""

    # Of every phase and of the ``total``, their sum: a phase lasts from when the last rank finished
    # the one before to when the last rank finished it.
    seconds: Mapping[str, float]
    output_TH: Tensor  # this rank's output (of all ranks, where they are emulated)


class RankedLayer(Rank):
    """The rank of a layer that is this process's, among as many processes as the layer has ranks.

    Every process makes one and calls the same methods.
    """

    def __init__(self, setting: LayerSetting, logits: Tensor, world: World) -> None:
        (experts,), shared = layer_weights(setting, (world.rank,))
        super().__init__(setting, logits, world.rank, experts, shared, lambda _method: world.total)
        self.world = world

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer."""
        return in_step(partial(self.forward, method), self.world, self.setting.device)

    def forward(self, method: Method, lap: Lap, hidden_TH: Tensor | None = None) -> Tensor:
        """Return the layer's output for this rank's tokens [T, H], each phase timed by ``lap``."""
        group = self.world.group
        routed = self.route(method, lap, hidden_TH)
        with lap("dispatch"):
            exchange = announce(routed.packed.counts_RL, group)
            arrived_AH = send_rows(routed.packed.rows_PH, exchange, group)
        with lap("experts"):
            done_AH = run_experts(self.experts, arrived_AH, exchange)
        with lap("return"):
            rows_PH = send_back(done_AH, exchange, group)
        return self.finish(rows_PH, routed, lap)

    def load(self, method: Method) -> PairLoad:
        """Return the pairs that the method leaves to be sent and computed, over all ranks."""
        return load_of([self], method, self.world)


@dataclass(frozen=True)
class PairLoad:
    """The pairs that a method leaves to be sent and computed, over all ranks."""

    kept: int  # pairs that are computed
    dropped_share: float  # pairs of the tokens' own top-k that are not, as a share of all
    expert_load: list[int]  # pairs of every expert
    rank_load: list[int]  # pairs of every rank's experts
    sent_bytes: int  # leave any rank in the first all-to-all; as many come back
    fullest_expert: int  # its pairs; of several layers, the sum of each one's own
    fullest_rank: int  # the same of the rank with most


@torch.no_grad()
def load_of(ranks: Sequence[Rank], method: Method, world: Ranks) -> PairLoad:
    """Return the load of all ranks of a layer, given those of this process."""
    setting, top_k = ranks[0].setting, ranks[0].setting.shape.top_k
    rows = []
    for rank in ranks:
        packed = rank.route(method, nullcontext).packed
        counts_RL, dropped_TK = packed.counts_RL, ~packed.keep_TS[:, :top_k]
        rows.append((counts_RL, dropped_TK.sum(), counts_RL.sum() - counts_RL[rank.number].sum()))
    sums = (torch.stack(each).sum(dim=0) for each in zip(*rows, strict=True))
    counts_RL, dropped, sent = world.totals(*sums)
    expert_load, rank_load = counts_RL.reshape(-1).tolist(), counts_RL.sum(dim=1).tolist()
    return PairLoad(
        kept=sum(expert_load),
        dropped_share=int(dropped) / (ranks[0].groups.n_tokens * top_k),
        expert_load=expert_load,
        rank_load=rank_load,
        sent_bytes=int(sent) * setting.row_bytes,
        fullest_expert=max(expert_load),
        fullest_rank=max(rank_load),
    )


def in_step(work: Callable[[Lap], Tensor], world: World, device: torch.device) -> Pass:
    """Do some work in all processes after one barrier; a phase ends with the last of them."""
    clock = Clock(device)
    clock.wait()
    dist.barrier(group=world.group)
    clock.start()
    output = work(clock.lap)
    ends = clock.ends()
    finished = torch.tensor(list(ends.values()), dtype=torch.float64, device=device)
    latest = world.highest(finished).tolist()
    return Pass(from_ends(dict(zip(ends, latest, strict=True))), output)


def measured_link(world: World, device: torch.device, *, repeats: int = 30) -> Link:
    """Measure an all-to-all between the processes, into memory that is asked for as in a layer.

    Its latency is that of tiny messages, its bandwidth that of large ones.
    """

    def seconds(rows: int) -> float:
        sent = torch.zeros(rows * world.size, _LINK_COLUMNS, device=device)

        def exchange(lap: Lap) -> Tensor:
            with lap("exchange"):
                dist.all_to_all_single(torch.empty_like(sent), sent, group=world.group)
            return sent

        return in_step(exchange, world, device).seconds["exchange"]

    # In turn, so that what disturbs the machine disturbs both.
    pairs = [(seconds(1), seconds(_LINK_ROWS)) for _ in range(repeats + 2)][2:]
    small, large = (statistics.median(of) for of in zip(*pairs, strict=True))
    outgoing = _LINK_ROWS * _LINK_COLUMNS * 4 * (world.size - 1)
    return Link(outgoing / max(large - small, 1e-9), small, "measured between the processes")
