"""EMULATED timing: every rank's work in turn on one device, and a stated all-to-all.

What is measured: gate, decision, packing, experts and combination of each rank, alone on the
device; the slowest rank counts, as it would between two exchanges. What is not: the exchanges. They
take ``latency + bytes / bandwidth`` of the rank that sends or receives most (:class:`Link`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capmoe_eval.method import Method
from capmoe_eval.parallel.dispatch import Exchange, run_experts
from capmoe_eval.parallel.layer import (
    LayerShape,
    Router,
    combined,
    random_experts,
    rank_tokens,
)
from capmoe_eval.parallel.timing import PHASES, Clock, Load, Pass, load_of, untimed

_BEFORE = ("gate", "decide", "permute")


@dataclass(frozen=True)
class Link:
    """A model of the all-to-all between ranks.

    Attributes:
        bandwidth: Bytes per second that a rank sends, and at the same time receives.
        latency: Seconds of an exchange of nothing.
    """

    bandwidth: float = 200e9
    latency: float = 20e-6

    def seconds(self, bytes_RR: Tensor) -> float:
        """Return the time of an exchange.

        Args:
            bytes_RR: Bytes from each rank (rows) to each rank (columns); what stays is free.
        """
        moving_RR = bytes_RR.double().clone()
        moving_RR.fill_diagonal_(0)
        busiest = max(float(moving_RR.sum(dim=0).max()), float(moving_RR.sum(dim=1).max()))
        return self.latency + busiest / self.bandwidth


class EmulatedLayer:
    """An MoE layer whose ranks take turns in one process.

    Args:
        shape: The layer.
        logits: Router logits [T·R, E] of the tokens of all ranks.
        size: Ranks R.
        link: How long the exchanges are taken to be.
        device: Where all ranks compute, one after the other.
        dtype: Precision.
        seed: Seed of weights and hidden states; with the same, the numbers are those of
            :class:`capmoe_eval.parallel.timing.RankedLayer`.
    """

    def __init__(
        self,
        shape: LayerShape,
        logits: Tensor,
        size: int,
        link: Link,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self._shape = shape
        self._size = size
        self._device = device
        self.link = link
        self._tokens = [
            rank_tokens(shape, logits, size, rank, device=device, dtype=dtype, seed=seed)
            for rank in range(size)
        ]
        self._experts = [
            random_experts(shape, size, rank, device=device, dtype=dtype, seed=seed)
            for rank in range(size)
        ]
        # Expert Drop's load is that of the whole batch, whoever asks.
        top_k = shape.top_k
        chosen = logits.topk(top_k, dim=1).indices.reshape(-1)
        load_E = torch.bincount(chosen, minlength=shape.n_experts).to(device)
        self._router = Router(shape, size, device=device, dtype=dtype, total=lambda _own: load_E)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Pass the batch through the layer rank by rank."""
        clocks = [Clock(self._device) for _ in range(self._size)]
        routed = [
            self._router(tokens, method, clock.lap)
            for tokens, clock in zip(self._tokens, clocks, strict=True)
        ]
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
            with clock.lap("experts"):
                done_AH = run_experts(self._experts[rank], arrived_AH, exchange)
            done.append(torch.split(done_AH, received))
        outputs = []
        for rank, clock in enumerate(clocks):
            rows_PH = torch.cat([there[rank] for there in done])
            with clock.lap("combine"):
                outputs.append(combined(rows_PH, routed[rank]))
        return Pass(self._seconds(clocks, pairs_RR), torch.cat(outputs))

    def _seconds(self, clocks: list[Clock], pairs_RR: Tensor) -> dict[str, float]:
        row_bytes = self._shape.hidden * self._tokens[0].hidden_TH.element_size()
        slowest = {
            phase: max(clock.seconds[phase] for clock in clocks)
            for phase in (*_BEFORE, "experts", "combine")
        }
        # Before the rows go the counts, in an exchange of their own.
        there = self.link.latency + self.link.seconds(pairs_RR * row_bytes)
        back = self.link.seconds(pairs_RR.T * row_bytes)
        before = max(sum(clock.seconds[phase] for phase in _BEFORE) for clock in clocks)
        total = before + there + slowest["experts"] + back + slowest["combine"]
        parts = {**slowest, "dispatch": there, "return": back}
        return {phase: parts[phase] for phase in PHASES} | {"total": total}

    @torch.no_grad()
    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed, over all ranks."""
        routed = [self._router(tokens, method, untimed) for tokens in self._tokens]
        counts_RRL = torch.stack([one.packed.counts_RL for one in routed])
        pairs_RR = counts_RRL.sum(dim=2)
        return load_of(
            counts_RRL.sum(dim=0),
            sum(one.kept for one in routed),
            sum(one.dropped for one in routed),
            int(pairs_RR.sum() - pairs_RR.diagonal().sum()),
            self._shape,
            self._tokens[0],
        )
