"""EMULATED timing: every rank's work in turn on one device, and a stated all-to-all.

What is measured: gate, decision, packing, experts, combination and shared experts of each rank,
alone on the device; the slowest rank counts, as it would between two exchanges. What is not: the
exchanges. They take ``latency + bytes / bandwidth`` of the rank that sends or receives most
(:class:`capmoe_eval.parallel.link.Link`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from capmoe_eval.method import Method
from capmoe_eval.parallel.clock import Clock, from_ends, untimed
from capmoe_eval.parallel.dispatch import Exchange, run_experts
from capmoe_eval.parallel.layer import (
    LayerSetting,
    Router,
    SharedExperts,
    finished,
    random_experts,
    rank_tokens,
    shared_experts,
)
from capmoe_eval.parallel.link import Link
from capmoe_eval.parallel.timing import Load, Pass, load_of, phases_of

_BEFORE = ("gate", "decide", "permute")


class EmulatedLayer:
    """An MoE layer whose ranks take turns in one process.

    Attributes:
        setting: The layer. With the same setting and logits, the numbers are those of
            :class:`capmoe_eval.parallel.timing.RankedLayer`.
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
        ends.append(ends[-1] + self.link.latency + self.link.seconds(bytes_RR))
        ends += _slowest(spent, ("experts",), ends[-1])
        ends.append(ends[-1] + self.link.seconds(bytes_RR.T))
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
            sum(one.kept for one in routed),
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
