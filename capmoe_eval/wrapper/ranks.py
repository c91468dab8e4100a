"""The processes that share a model's experts, as the wrapper asks them, and their exchanges.

A model may be spread over expert-parallel processes (:mod:`capmoe_eval.wrapper.parallel`): each has
E/R experts of every layer and its own sequences of the batch, and decides on its own tokens only.
It asks the others for their numbers of tokens and for sums of counts, so that bounds and statistics
are those of the whole batch.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import BatchShare

EXPERTS_RANKS = "capmoe_ranks"
"""Name of the attribute that holds the :class:`Ranks` of experts spread over processes."""


class Ranks:
    """The processes of a model; here the only one, which has all experts and the whole batch.

    :class:`capmoe_eval.wrapper.ranks.World` answers by collective operations, which all
    processes must call in the same order.
    """

    size: int = 1  # number of processes R
    idle: bool = False  # whether this process has no sequence of the batch and computes a stand-in

    def own(self, rows_B: Tensor) -> Tensor:
        """Return this process's rows of a batch that all processes were given."""
        return rows_B

    def share(self, tokens_B: Tensor) -> BatchShare | None:
        """Return the whole batch, given the counted tokens of this process's sequences.

        None if one process has it.
        """
        return None

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        """Return the sum over all processes of each of several tensors of one type."""
        return counts

    def total(self, amount: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        return self.totals(amount)[0]

    def collect(self, part: Any) -> list[Any]:
        """Return all processes' parts, in their order, in the first process; [] in the others."""
        return [part]

    def highest(self, amount: Tensor) -> Tensor:
        """Return the maximum of a tensor over all processes."""
        return amount


ALONE = Ranks()
"""The one process of a model that is not spread."""


def ranks_in(model: Any) -> list[Any]:
    """Return the groups of processes that share a model's experts; mostly an empty list.

    For an object that is no model the list is empty.
    """
    if not isinstance(model, torch.nn.Module):
        return []
    groups = (getattr(module, EXPERTS_RANKS, None) for module in model.modules())
    return list({id(ranks): ranks for ranks in groups if ranks is not None}.values())


# Shape suffixes: B sequences of the whole batch.


def own_rows(n_sequences: int, rank: int, size: int) -> slice:
    """Return a rank's sequences of a batch: sequence b of B is on rank floor(b·R/B)."""
    return slice(-(-rank * n_sequences // size), -(-(rank + 1) * n_sequences // size))


class World(Ranks):
    """One process among those that share a model's experts."""

    def __init__(self, group: Any = None) -> None:
        self.group = group  # None is the default one
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # Whether the model is called with the whole batch everywhere and takes its own part
        # (`split_batches`), or with that part.
        self.splits = False

    @classmethod
    def join(cls, device: torch.device, *, timeout: timedelta = timedelta(minutes=30)) -> World:
        """Join the processes that ``torchrun`` started; NCCL between GPUs, gloo between CPUs.

        All of them fail where one waits for another for longer than ``timeout``.

        Raises:
            UsageError: If the process was not started by ``torchrun``.
        """
        if not dist.is_initialized():
            if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
                raise UsageError(
                    "parallel=ep: needs one process per rank; start them with torchrun, for "
                    "example torchrun --nproc-per-node 2 -m capmoe_eval parallel=ep ep_size=2"
                )
            on_gpu = device.type == "cuda"
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None
            )
            atexit.register(dist.destroy_process_group)
        return cls()

    @property
    def backend(self) -> str:
        """Backend of the exchanges: ``nccl`` or ``gloo``."""
        return str(dist.get_backend(self.group))

    def own(self, rows_B: Tensor) -> Tensor:
        """Return this process's sequences of a batch; the first stands in where there are none.

        So every process takes part in every exchange.
        """
        if not self.splits:
            return rows_B
        rows = own_rows(len(rows_B), self.rank, self.size)
        return rows_B[rows] if rows.start < rows.stop else rows_B[:1]

    def share(self, tokens_B: Tensor) -> BatchShare:
        """Return the whole batch, given the counted tokens of this process's sequences."""
        sizes = torch.zeros(self.size, dtype=torch.long, device=tokens_B.device)
        sizes[self.rank] = len(tokens_B)
        dist.all_reduce(sizes, group=self.group)
        first, total = int(sizes[: self.rank].sum()), int(sizes.sum())
        all_B = tokens_B.new_zeros(total)
        all_B[first : first + len(tokens_B)] = tokens_B
        dist.all_reduce(all_B, group=self.group)
        owner_B = torch.arange(self.size, device=tokens_B.device).repeat_interleave(sizes)
        return all_B, owner_B, self.size, first

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        """Return the sum over all processes of each of several tensors, in one exchange."""
        flat = torch.cat([count.reshape(-1) for count in counts])
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat, [count.numel() for count in counts])
        return tuple(part.view(count.shape) for part, count in zip(parts, counts, strict=True))

    def collect(self, part: Any) -> list[Any]:
        """Return all processes' parts, in their order, in the first process; [] in the others."""
        is_first = self.rank == 0
        parts: list[Any] = [None] * self.size
        dist.gather_object(part, parts if is_first else None, group=self.group, group_dst=0)
        return parts if is_first else []

    def highest(self, amount: Tensor) -> Tensor:
        """Return the maximum over all processes."""
        most = amount.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most

    def gather(self, rows: Tensor, n_sequences: int) -> Tensor:
        """Return the rows [B, …] of the whole batch from every process's own, without stand-ins."""
        shares = [own_rows(n_sequences, rank, self.size) for rank in range(self.size)]
        counts = [share.stop - share.start for share in shares]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: counts[self.rank]] = rows[: counts[self.rank]]
        parts = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def tell(self, value: Any) -> Any:
        """Return the first process's value in every process."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def agree(self, what: str, text: str) -> None:
        """Check that all processes were asked for the same.

        Raises:
            UsageError: In all of them, if they differ.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        digests: list[Any] = [None] * self.size
        dist.all_gather_object(digests, digest, group=self.group)
        if len(set(digests)) > 1:
            raise UsageError(f"parallel=ep: the processes disagree about {what}; start them alike")
