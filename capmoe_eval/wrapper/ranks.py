"""The interface to the other processes that share a model's experts.

A model may be spread over expert-parallel processes (``wrapper/parallel``): each has E/R experts of
every layer and its own sequences of the batch, and decides on its own tokens only. Through this
interface it asks for the other processes' numbers of tokens, and for sums of counts, so that bounds
and statistics are those of the whole batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from capmoe_eval.routing.capacity import BatchShare

EXPERTS_RANKS = "capmoe_ranks"
"""Name of the attribute that holds the :class:`Ranks` of experts spread over processes."""


class Ranks(Protocol):
    """Collective operations of the processes; each must call them in the same order."""

    @property
    def rank(self) -> int:
        """Index of this process."""

    @property
    def size(self) -> int:
        """Number of processes R."""

    @property
    def idle(self) -> bool:
        """True if this process has no sequence of the batch and computes a stand-in."""

    def own(self, rows_B: Tensor) -> Tensor:
        """Return this process's rows of a batch that every process was called with."""

    def share(self, tokens_B: Tensor) -> BatchShare | None:
        """Return the whole batch, from the numbers of counted tokens of this process's sequences.

        None if one process has the whole batch.
        """

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        """Return the sum over all processes of each tensor of whole numbers."""

    def total(self, amount: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def highest(self, amount: Tensor) -> Tensor:
        """Return the maximum of a tensor over all processes."""


class Alone:
    """The only process: it has all experts and the whole batch."""

    rank = 0
    size = 1
    idle = False

    def own(self, rows_B: Tensor) -> Tensor:
        """Return all rows."""
        return rows_B

    def share(self, tokens_B: Tensor) -> BatchShare | None:
        """Return None: the batch is whole."""
        del tokens_B
        return None

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        """Return the counts."""
        return counts

    def total(self, amount: Tensor) -> Tensor:
        """Return the amount."""
        return amount

    def highest(self, amount: Tensor) -> Tensor:
        """Return the amount."""
        return amount


ALONE = Alone()


def ranks_of(experts: torch.nn.Module) -> Ranks:
    """Return the processes that share an experts module; :data:`ALONE` if it is not spread."""
    ranks: Any = getattr(experts, EXPERTS_RANKS, ALONE)
    known: Ranks = ranks
    return known


def ranks_in(model: Any) -> list[Any]:
    """Return the distinct groups of processes that share experts of a model; none for most models.

    Args:
        model: A loaded model; for any other object the list is empty.
    """
    if not isinstance(model, torch.nn.Module):
        return []
    found = (getattr(module, EXPERTS_RANKS, None) for module in model.modules())
    return list({id(ranks): ranks for ranks in found if ranks is not None}.values())
