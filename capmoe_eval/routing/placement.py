"""Say which experts each emulated rank holds: a contiguous block, or those of a placement.

A placement [R, E/R] has the experts of every rank, in rising order, each expert once; None stands
for contiguous blocks. It says which experts share a device. The numbers of experts, and with them
all ties, stay.
"""

from __future__ import annotations

from torch import Tensor

# Shape suffixes: E routed experts, R ranks, N = E/R experts of a rank.


def by_rank(amount_E: Tensor, ranks: int, placed_RN: Tensor | None) -> Tensor:
    """Return amounts of experts […, E] as those of the experts of each rank […, R, N]."""
    if placed_RN is None:
        return amount_E.view(*amount_E.shape[:-1], ranks, -1)
    return amount_E[..., placed_RN]


def rank_of(expert: Tensor, local: int, placed_RN: Tensor | None) -> Tensor:
    """Return the rank that holds each of some experts; ``local`` is N, the experts of a rank."""
    if placed_RN is None:
        return expert // local
    return placed_RN.flatten().argsort()[expert] // local
