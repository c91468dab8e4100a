"""Time an MoE layer over ranks by phase, and the prefill of a model of such layers.

Each rank is a process, or all ranks are EMULATED on one device. Then gate, decision, packing,
experts, combination and shared experts of each rank are measured in turn, alone on the device; the
slowest rank counts, as it would between two exchanges. The exchanges are not run: they take
``latency + bytes / bandwidth`` of the rank that sends or receives most.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from capmoe_eval.routing.decision import Scores, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.parallel import Exchange, announce, send_back, send_rows
from capmoe_eval.wrapper.ranks import ALONE, World
from torch import Tensor, nn

from capmoe_bench.ep.layer import Lap, LayerSetting, Rank, decided, layer_weights, random_model
from capmoe_bench.ep.links import NODE, Link
from capmoe_bench.rounds import wait

# Shape suffixes: R ranks, L experts of a rank, T tokens, K = top-k, E experts, H hidden size,
# P kept pairs of a rank's tokens, A pairs that arrived at a rank, B sequences, S positions.

PHASES = ("gate", "decide", "permute", "dispatch", "experts", "return", "combine", "shared")
"""The phases of a layer, in order; only one with shared experts has the last. Figure 6 shows the
first two, and the exchanges, as one."""
_VOCABULARY = 32_000
_LINK_ROWS, _LINK_COLUMNS = 8192, 256  # float32 to each rank: 8 MiB


class Clock:
    """Notes when each phase of a pass begins and ends, without disturbing it.

    It counts from when the device had nothing to do. On a GPU the marks are events in its stream,
    so that nothing waits between phases; elsewhere they are the time of day.
    """

    def __init__(self, device: torch.device) -> None:
        wait(device)
        self.device, self._origin = device, _mark(device)
        self._laps: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def lap(self, phase: str) -> Iterator[None]:
        """Note when a block begins and ends."""
        begun = _mark(self.device)
        yield
        self._laps[phase] = begun, _mark(self.device)

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took."""
        wait(self.device)
        return {phase: _between(*marks) for phase, marks in self._laps.items()}

    def ends(self) -> dict[str, float]:
        """Return when each phase ended, in seconds since the clock was made."""
        wait(self.device)
        return {phase: _between(self._origin, ended) for phase, (_, ended) in self._laps.items()}


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(begun: Any, ended: Any) -> float:
    return float(ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1e3)


Pass = tuple[dict[str, float], Tensor]
"""Of one pass through a layer or a model: the seconds of every phase and of the ``total``, their
sum; and this rank's output (of all ranks, where they are emulated). A phase lasts from when the
last rank finished the one before to when the last rank finished it."""


def from_ends(ends: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of phases that follow each other, and their sum as ``total``.

    Args:
        ends: When the last rank had finished each phase, in seconds since all of them began.
    """
    times = [0.0, *ends.values()]
    steps = zip(ends, itertools.pairwise(times), strict=True)
    return {phase: max(0.0, end - begun) for phase, (begun, end) in steps} | {"total": times[-1]}


def in_step(work: Callable[[Lap], Tensor], world: World, device: torch.device) -> Pass:
    """Do some work in all processes after one barrier; a phase ends with the last of them."""
    wait(device)
    dist.barrier(group=world.group)
    clock = Clock(device)
    output = work(clock.lap)
    ends = clock.ends()
    finished = torch.tensor(list(ends.values()), dtype=torch.float64, device=device)
    latest = world.highest(finished).tolist()
    return from_ends(dict(zip(ends, latest, strict=True))), output


class TimedLayer:
    """An MoE layer over ranks, under the routing of router logits [T·R, E] of all tokens.

    In a world every process makes one, of its own rank, and calls the same methods. Without one,
    the ranks take turns in this process over an emulated link.
    """

    def __init__(
        self, setting: LayerSetting, logits: Tensor, world: World | None = None, link: Link = NODE
    ) -> None:
        self.setting, self.world, self._link = setting, world, link
        numbers = (world.rank,) if world else tuple(range(setting.ranks))
        self.ranks = [
            Rank(setting, logits, number, weights, self._total)
            for number, weights in zip(numbers, layer_weights(setting, numbers), strict=True)
        ]
        self._logits_TE = logits
        self._emulated_totals = functools.cache(self._whole_batch)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer."""
        if self.world:
            return in_step(partial(self.exchange, method), self.world, self.setting.device)
        return self._emulate(method)

    def exchange(self, method: Method, lap: Lap, hidden_TH: Tensor | None = None) -> Tensor:
        """Return the layer's output for this process's tokens [T, H], each phase timed."""
        assert self.world
        group, steps = self.world.group, self.ranks[0].steps(method, lap, hidden_TH)
        packed = next(steps)
        with lap("dispatch"):
            exchange = announce(packed.counts_RL, group)
            arrived_AH = send_rows(packed.rows_PH, exchange, group)
        done_AH = steps.send((arrived_AH, exchange))
        with lap("return"):
            rows_PH = send_back(done_AH, exchange, group)
        out_TH: Tensor = steps.send(rows_PH)
        return out_TH

    def _emulate(self, method: Method) -> Pass:
        """Pass the batch through the layer rank by rank; rows change their rank in between."""
        clocks = [Clock(self.setting.device) for _ in self.ranks]
        works = [
            rank.steps(method, clock.lap) for rank, clock in zip(self.ranks, clocks, strict=True)
        ]

        def resume(sent: Iterable[Any]) -> list[Any]:
            results = []
            for work, rows in zip(works, sent, strict=True):
                wait(self.setting.device)
                results.append(work.send(rows))
            return results

        numbers = range(len(works))
        packed = resume(None for _ in numbers)
        counts_RRL = torch.stack([pairs.counts_RL for pairs in packed])  # [source, rank, L]
        pairs_RR = counts_RRL.sum(dim=2).cpu()
        rows = [
            torch.split(pairs.rows_PH, counts)
            for pairs, counts in zip(packed, pairs_RR.tolist(), strict=True)
        ]
        received = pairs_RR.T.tolist()
        done = resume(
            (
                torch.cat([part[number] for part in rows]),
                Exchange(counts_RRL[:, number], [], received[number]),
            )
            for number in numbers
        )
        back = [torch.split(*of_rank) for of_rank in zip(done, received, strict=True)]
        outputs = resume(torch.cat([part[number] for part in back]) for number in numbers)
        spent = [clock.seconds() for clock in clocks]
        return self.seconds(spent, pairs_RR), torch.cat(outputs)

    def seconds(self, spent: Sequence[Mapping[str, float]], pairs_RR: Tensor) -> dict[str, float]:
        """Return the seconds of phases, given those of each rank and the pairs between ranks."""
        link, bytes_RR = self._link, pairs_RR * self.setting.row_bytes
        # Before the rows go the counts, in an exchange of their own.
        exchanges = {
            "dispatch": link.latency + link.seconds(bytes_RR),
            "return": link.seconds(bytes_RR.T),
        }
        ready_R, ends = np.zeros(len(spent)), {}
        for phase in PHASES:
            if phase in exchanges:  # begins when the last rank is ready for it
                ready_R = np.full_like(ready_R, ready_R.max() + exchanges[phase])
            elif phase in spent[0]:
                ready_R = ready_R + [of_rank[phase] for of_rank in spent]
            if phase in exchanges or phase in spent[0]:
                ends[phase] = float(ready_R.max())
        return from_ends(ends)

    def _total(self, method: Method) -> Callable[[Tensor], Tensor]:
        if self.world:
            return self.world.total
        number = itertools.count()  # in the order in which a rank asks for them
        return lambda _count: self._emulated_totals(method)[next(number)]

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
        decided(method, Scores(score_TE, topk_TK), groups, total=total)
        return totals

    @torch.no_grad()
    def load(self, method: Method) -> dict[str, Any]:
        """Return the pairs that the method leaves to be sent and computed, as a study's file."""
        top_k, rows = self.setting.shape.top_k, []
        for rank in self.ranks:
            packed = next(rank.steps(method))
            counts_RL, dropped_TK = packed.counts_RL, ~packed.keep_TS[:, :top_k]
            leaving = counts_RL.sum() - counts_RL[rank.number].sum()
            rows.append((counts_RL, dropped_TK.sum(), leaving))
        sums = (torch.stack(each).sum(dim=0) for each in zip(*rows, strict=True))
        counts_RL, dropped, sent = (self.world or ALONE).totals(*sums)
        expert_load, rank_load = counts_RL.reshape(-1).tolist(), counts_RL.sum(dim=1).tolist()
        return {
            "kept": sum(expert_load),  # pairs that are computed, over all ranks
            # Pairs of the tokens' own top-k that are not computed, as a share of all.
            "dropped_share": int(dropped) / (self.ranks[0].groups.n_tokens * top_k),
            "expert_load": expert_load,  # pairs of every expert
            "rank_load": rank_load,  # pairs of every rank's experts
            # What leaves any rank in the first all-to-all; as much comes back.
            "sent_bytes": int(sent) * self.setting.row_bytes,
            "fullest_expert": max(expert_load),  # of several layers, the sum of each one's own
            "fullest_rank": max(rank_load),
        }


class TimedPrefill:
    """A random model on a rank's sequences, each MoE layer with its own routing.

    Attention, norms, embeddings and head are OLMoE's, of the layer's hidden size; every rank
    computes them for its own sequences. Layers of real ranks are in the model. EMULATED ones are
    timed beside it, and the model is the dense part of one rank. ``tokens`` are those of this rank,
    ``prompt`` those of a sequence.
    """

    def __init__(self, layers: Sequence[TimedLayer], tokens: int, prompt: int) -> None:
        self._layers, self._method = layers, create_method("baseline")
        setting = layers[0].setting
        replaced = replace(setting.shape, intermediate=8, n_experts=2, top_k=1)
        dense = replace(setting, shape=replaced)
        model = random_model(dense, layers=len(layers), vocabulary=_VOCABULARY)
        for decoder, layer in zip(model.model.layers, layers, strict=True):
            decoder.mlp = nn.Identity()
            if layer.world:
                decoder.mlp.forward = partial(self._through, layer)
        tokens_N = torch.arange(tokens, device=setting.device) * 7919 % _VOCABULARY
        self._model = partial(model, tokens_N.view(-1, prompt), use_cache=False, logits_to_keep=1)

    def _through(self, layer: TimedLayer, hidden_BSH: Tensor) -> Tensor:
        out_TH = layer.exchange(self._method, nullcontext, hidden_BSH.flatten(0, 1))
        return out_TH.view(hidden_BSH.shape)

    def _logits(self, phase: str, lap: Lap) -> Tensor:
        with lap(phase):
            logits: Tensor = self._model().logits
        return logits

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the prefill once, until the last rank has finished it."""
        self._method, first = method, self._layers[0]
        if first.world:
            return in_step(partial(self._logits, "total"), first.world, first.setting.device)
        clock = Clock(first.setting.device)
        logits = self._logits("dense", clock.lap)
        dense = clock.seconds()["dense"]
        moe = sum(layer.run(method)[0]["total"] for layer in self._layers)
        return {"dense": dense, "moe": moe, "total": dense + moe}, logits

    def load(self, method: Method) -> dict[str, Any]:
        """Return the sums over the layers' loads, and the mean of the dropped shares."""
        loads = [layer.load(method) for layer in self._layers]
        sums = {name: np.sum([load[name] for load in loads], axis=0).tolist() for name in loads[0]}
        return sums | {"dropped_share": sums["dropped_share"] / len(loads)}


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

        return in_step(exchange, world, device)[0]["exchange"]

    # In turn, so that what disturbs the machine disturbs both.
    pairs = [(seconds(1), seconds(_LINK_ROWS)) for _ in range(repeats + 2)][2:]
    small, large = (statistics.median(of) for of in zip(*pairs, strict=True))
    outgoing = _LINK_ROWS * _LINK_COLUMNS * 4 * (world.size - 1)
    return Link(outgoing / max(large - small, 1e-9), small, "measured between the processes")
