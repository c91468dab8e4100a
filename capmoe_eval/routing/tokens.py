"""Form the groups of tokens that share a capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# Shape suffixes: B sequences, S positions, N = B·S rows of the flattened batch, T counted tokens,
# G capacity groups.


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``, without waiting for a copy from the host.

    CUDA has read such a source when the call returns, since its memory is not pinned.
    """
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


@dataclass(frozen=True)
class TokenGroups:
    """The counted tokens of a flattened batch, and the capacity group and rank of each.

    Where several processes share the batch, the rows are this process's own; ``tokens`` covers all.
    """

    rows_T: Tensor  # rows of the counted tokens in the flattened [B·S] batch, ascending
    group_T: Tensor  # capacity group of each counted token, ascending
    rank_T: Tensor  # rank of each counted token
    # Counted tokens of each of the G groups, on the host, so that capacities are computed without
    # waiting for a device.
    tokens: tuple[int, ...]
    n_rows: int  # N = B·S
    first: int = 0  # counted tokens on the processes before this one

    @property
    def n_tokens(self) -> int:
        """Number of counted tokens T over all groups."""
        return sum(self.tokens)

    @property
    def every_row_counts(self) -> bool:
        """True if every row of this process is a counted token."""
        return len(self.rows_T) == self.n_rows

    def counted(self, value_N: Tensor) -> Tensor:
        """Return the values of the counted tokens [T, …] from those of every row [N, …]."""
        return value_N if self.every_row_counts else value_N.index_select(0, self.rows_T)

    def every_row(self, value_TS: Tensor, other: float) -> Tensor:
        """Return a value for every row [N, S]: a counted token's own, ``other`` for other rows."""
        if self.every_row_counts:
            return value_TS
        value_NS = value_TS.new_full((self.n_rows, value_TS.shape[1]), other)
        return value_NS.index_copy_(0, self.rows_T, value_TS)

    def to(self, device: torch.device) -> TokenGroups:
        """Return the groups with their tensors on ``device``."""
        tensors = (self.rows_T, self.group_T, self.rank_T)
        rows_T, group_T, rank_T = (moved(tensor, device) for tensor in tensors)
        return TokenGroups(rows_T, group_T, rank_T, self.tokens, self.n_rows, self.first)


BatchShare: TypeAlias = tuple[Tensor, Tensor, int, int]
"""The sequences of a batch that several processes share, and this process's place among them.

They are the counted tokens of every sequence [B], the process of each, ascending [B], the number of
processes, and the index of this process's first sequence.
"""


def group_tokens(
    counted_BS: Tensor,
    *,
    ep_size: int = 1,
    scope: str = "batch",
    share: BatchShare | None = None,
) -> TokenGroups:
    """Spread the sequences of a batch over emulated ranks and form the capacity groups.

    ``counted_BS`` is true where a token counts in T and takes slots. Sequence b of B goes to rank
    ``floor(b·R/B)`` of R = ``ep_size`` (neighbours together, as data parallelism would). With
    ``scope="batch"`` a rank is one group (paper §4, Figure 3: the *local* capacity), with
    ``scope="sequence"`` every sequence is one. Where ``counted_BS`` is one process's part of a
    batch, ``share`` describes the whole, and each process is one rank (with ``ep_size=1`` all of
    them together are one).
    """
    device = counted_BS.device
    if share is None:
        tokens_B, first = counted_BS.sum(dim=1), 0
        rank_B = torch.arange(len(tokens_B), device=device) * ep_size // len(tokens_B)
    else:
        tokens_B, owner_B, size, first = share
        rank_B = owner_B * ep_size // size
    group_B = rank_B if scope == "batch" else torch.arange(len(tokens_B), device=device)
    n_groups = ep_size if scope == "batch" else len(tokens_B)
    tokens_G = torch.zeros(n_groups, dtype=torch.long, device=device)
    tokens_G.scatter_add_(0, group_B, tokens_B)
    rows_T = counted_BS.reshape(-1).nonzero().squeeze(1)
    sequence_T = first + rows_T // max(counted_BS.shape[1], 1)
    return TokenGroups(
        rows_T=rows_T,
        group_T=group_B[sequence_T],
        rank_T=rank_B[sequence_T],
        tokens=tuple(tokens_G.tolist()),
        n_rows=counted_BS.numel(),
        first=int(tokens_B[:first].sum()) if first else 0,
    )
