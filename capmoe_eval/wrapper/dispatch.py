"""Send kept pairs to the ranks of their experts and their outputs back, in six phases.

The phases are functions of their own, in the order of this module, so that
benchmarks of expert parallelism can time them. Registered with transformers, they are
``DistributedConfig(ep_implementation="capmoe")``. Stock ``all_to_all`` sends every slot, and a
dropped one (index E) breaks its counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import expert_load
from capmoe_eval.wrapper.kernel import combine
from capmoe_eval.wrapper.ranks import EXPERTS_RANKS, World

# Shape suffixes: T own tokens, S slots per token, P kept pairs of own tokens, A pairs that arrived,
# H hidden size, R ranks, L experts of a rank.

IMPLEMENTATION = "capmoe"
"""Name of the implementation in transformers' registry."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Packed:
    """Kept pairs, ready to be sent."""

    rows_PH: Tensor  # hidden state of each pair's token, ordered by expert, then by token
    place_P: Tensor  # row of each pair, the pairs in the order of tokens and slots
    keep_TS: Tensor  # the kept slots
    counts_RL: Tensor  # pairs for each expert of each rank


@dataclass(frozen=True)
class Exchange:
    """Numbers of pairs that this rank sends and receives."""

    counts_RL: Tensor  # pairs that arrive from each rank for each of our experts
    send: list[int]  # pairs that go to each rank
    receive: list[int]  # pairs that come from each rank


def lay_out(hidden_TH: Tensor, index_TS: Tensor, *, n_experts: int, size: int) -> Packed:
    """Lay out the kept pairs of this rank's tokens by expert, of ``n_experts`` on ``size`` ranks.

    ``index_TS`` is the expert of each slot; ``n_experts`` marks a dropped one.
    """
    keep_TS = index_TS < n_experts
    pair_P = keep_TS.reshape(-1).nonzero().squeeze(1)
    expert_P, order_P = index_TS.reshape(-1).index_select(0, pair_P).sort(stable=True)
    token_P = pair_P.index_select(0, order_P).div_(index_TS.shape[1], rounding_mode="floor")
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    counts_E = expert_load(expert_P, n_experts)
    return Packed(hidden_TH.index_select(0, token_P), place_P, keep_TS, counts_E.view(size, -1))


def announce(counts_RL: Tensor, group: Any) -> Exchange:
    """Tell every rank how many pairs it gets for each of its experts."""
    arriving_RL = torch.empty_like(counts_RL)
    dist.all_to_all_single(arriving_RL, counts_RL, group=group)
    # The one wait for the device: split sizes must be known on the host.
    send, receive = torch.stack([counts_RL.sum(dim=1), arriving_RL.sum(dim=1)]).tolist()
    return Exchange(arriving_RL, send, receive)


def send_rows(rows_PH: Tensor, exchange: Exchange, group: Any) -> Tensor:
    """Send each pair's row to the rank of its expert; return the rows that arrive [A, H]."""
    arrived_AH = rows_PH.new_empty(sum(exchange.receive), rows_PH.shape[1])
    dist.all_to_all_single(arrived_AH, rows_PH, exchange.receive, exchange.send, group=group)
    return arrived_AH


def run_experts(experts: Experts, arrived_AH: Tensor, exchange: Exchange) -> Tensor:
    """Run this rank's experts, each on the rows that came for it [A, H]."""
    n_arrived, counts_RL = len(arrived_AH), exchange.counts_RL
    if not n_arrived:
        return arrived_AH
    local_L = torch.arange(counts_RL.shape[1], device=arrived_AH.device)
    index_A = local_L.repeat(len(counts_RL)).repeat_interleave(
        counts_RL.reshape(-1), output_size=n_arrived
    )
    weight_A1 = arrived_AH.new_ones(n_arrived, 1)  # the sender weighs
    return experts(arrived_AH, index_A[:, None], weight_A1)


def send_back(done_AH: Tensor, exchange: Exchange, group: Any) -> Tensor:
    """Return the outputs to the ranks of their tokens [P, H], ordered as they were sent."""
    rows_PH = done_AH.new_empty(sum(exchange.send), done_AH.shape[1])
    dist.all_to_all_single(
        rows_PH, done_AH.contiguous(), exchange.send, exchange.receive, group=group
    )
    return rows_PH


def combine_rows(rows_PH: Tensor, packed: Packed, weight_TS: Tensor) -> Tensor:
    """Return the weighted sum of each token's outputs [T, H], as the single-process kernel does.

    A pair is weighed in the rows' precision and added in float32, a token's pairs in slot order:
    the bits are the same. The rows are weighed in place, since they are the largest tensor here.
    """
    weight_P = torch.empty_like(packed.place_P, dtype=weight_TS.dtype)  # as the rows lie
    weight_P[packed.place_P] = weight_TS[packed.keep_TS]
    rows_PH *= weight_P[:, None]
    return combine(rows_PH, packed.keep_TS, packed.place_P).to(rows_PH.dtype)


class KeptPairs(EPImplementation):  # type: ignore[misc]
    """Expert parallelism of transformers that sends kept pairs and nothing else; for inference.

    One is built for every experts module. Every process calls it with its own tokens, and all of
    them must: also one that has none.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise UsageError(
                f"tp_size={tp_mesh.size()}: {IMPLEMENTATION!r} takes every process for a rank with "
                "tokens of its own; leave tp_size at 1"
            )
        # One world for all layers of a model, which share the mesh.
        self.world = getattr(ep_mesh, EXPERTS_RANKS, None) or World(ep_mesh.get_group())
        self.n_experts = int(experts.num_experts) * self.world.size  # type: ignore[arg-type]
        self._experts_forward = experts.forward
        for owner in (ep_mesh, experts):
            setattr(owner, EXPERTS_RANKS, self.world)

    def __call__(self, hidden_TH: Tensor, index_TS: Tensor, weight_TS: Tensor) -> Tensor:
        """Return the weighted sum of the kept experts' outputs for this rank's tokens [T, H]."""
        if torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_TS.requires_grad):
            raise UsageError(
                f"ep_implementation={IMPLEMENTATION}: it has no backward; call the model under "
                "torch.no_grad()"
            )
        group = self.world.group
        packed = lay_out(hidden_TH, index_TS, n_experts=self.n_experts, size=self.world.size)
        exchange = announce(packed.counts_RL, group)
        arrived_AH = send_rows(packed.rows_PH, exchange, group)
        done_AH = run_experts(self._experts_forward, arrived_AH, exchange)
        return combine_rows(send_back(done_AH, exchange, group), packed, weight_TS)


EPImplementationInterface.register(IMPLEMENTATION, KeptPairs)
