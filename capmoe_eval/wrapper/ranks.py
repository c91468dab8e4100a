"""The processes that share a model's experts, as the wrapper asks them.

A model may be spread over expert-parallel processes (``wrapper/parallel``): each has E/R experts of
every layer and its own sequences of the batch, and decides on its own tokens only. It asks the
others for their numbers of tokens and for sums of counts, so that bounds and statistics are those
of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.tokens import BatchShare

EXPERTS_RANKS = "capmoe_ranks"
"""Name of the attribute that holds the :class:`Ranks` of experts spread over processes."""


class Ranks:
    """The processes of a model; here the only one, which has all experts and the whole batch.

    :class:`capmoe_eval.wrapper.parallel.world.World` answers by collective operations, which all
    processes must call in the same order.
    """

    size: int = 1  # number of processes R
    idle: bool = False  # whether this process has no sequence of the batch and computes a stand-in

    def own(self, rows_B: Tensor) -> Tensor:
        """Return this process's rows of a batch that every process was called with."""
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
        """Return every process's part in the first process, in their order; nothing in others."""
        return [part]

    def highest(self, amount: Tensor) -> Tensor:
        """Return the maximum of a tensor over all processes."""
        return amount


ALONE = Ranks()
"""The one process of a model that is not spread."""


def ranks_in(model: Any) -> list[Any]:
    """Return the distinct groups of processes that share experts of a model; none for most models.

    For an object that is no model the list is empty.
    """
    if not isinstance(model, torch.nn.Module):
        return []
    found = (getattr(module, EXPERTS_RANKS, None) for module in model.modules())
    return list({id(ranks): ranks for ranks in found if ranks is not None}.values())
