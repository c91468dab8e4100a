"""The processes that share a model's experts, as one of them sees them.

A model may be spread over expert-parallel processes (:mod:`capmoe_eval.parallel`): each has E/R
experts of every layer and its own sequences of the batch, and decides on its own tokens alone, as a
source rank does. What concerns the whole batch is asked here: how many tokens the others have, and
sums of counts, so that bounds and statistics are those of the whole.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from capmoe_eval.routing import BatchShare

EXPERTS_RANKS = "capmoe_ranks"
"""Attribute of an experts module that is spread over processes: its :class:`Ranks`."""


class Ranks(Protocol):
    """What a capacity asks of the other processes. Every process must ask in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """Number of processes R."""

    @property
    def idle(self) -> bool:
        """Whether the running forward is a stand-in, because the batch had no sequence for us."""

    def own(self, rows_B: Tensor) -> Tensor:
        """Return this process's sequences of a batch that all of them were called with."""

    def share(self, tokens_B: Tensor) -> BatchShare | None:
        """Return the whole batch, given the counted tokens of this process's sequences."""

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over all processes of whole numbers, each of its own shape."""

    def total(self, amount: Tensor) -> Tensor:
        """Return the sum over all processes."""

    def highest(self, amount: Tensor) -> Tensor:
        """Return the maximum over all processes."""


class Alone:
    """One process has everything: nothing is asked of anyone."""

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
    """Return the processes that share an experts module."""
    ranks: Any = getattr(experts, EXPERTS_RANKS, ALONE)
    known: Ranks = ranks
    return known


def ranks_in(model: Any) -> list[Any]:
    """Return the groups of processes that share the experts of a model, each once; mostly none.

    Args:
        model: A loaded model, or whatever stands for one that is not loaded yet.
    """
    if not isinstance(model, torch.nn.Module):
        return []
    found = (getattr(module, EXPERTS_RANKS, None) for module in model.modules())
    return list({id(ranks): ranks for ranks in found if ranks is not None}.values())
