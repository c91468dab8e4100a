"""The capacity of an expert, and the groups of tokens that each have their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from capmoe_eval.errors import UsageError

# Shape suffixes: B sequences, S positions, N = B·S rows of the flattened batch, T counted tokens,
# G capacity groups.


def capacity(
    gamma: float,
    tokens: int,
    top_k: int,
    n_experts: int,
    *,
    rounding: str = "ceil",
    experts: int = 1,
) -> int:
    """Return C, the most pairs that a group of tokens may send to an expert (or to a device).

    ``C = ceil(γ·T·K/E)`` for one expert (paper §4, ``C = γ·N̄``), ``ceil(n·γ·T·K/E)`` for a device
    of n experts (paper §5.2). The arithmetic is exact: γ is read as the decimal that was written,
    so γ=1.1 of 100 is 110 and not, by way of binary fractions, 111.

    Args:
        gamma: Capacity factor γ ≥ 0; ``inf`` for no capacity.
        tokens: Counted tokens T of the group.
        top_k: Experts K per token.
        n_experts: Routed experts E.
        rounding: ``ceil`` or ``floor`` (Algorithms 1 and 2).
        experts: Number of experts n that share the capacity.

    Returns:
        C, clamped to [0, n·T]: an expert meets a token at most once.
    """
    if gamma == math.inf:
        return experts * tokens
    exact = Fraction(repr(float(gamma))) * experts * tokens * top_k / n_experts
    rounded = math.ceil(exact) if rounding == "ceil" else math.floor(exact)
    return min(max(rounded, 0), experts * tokens)


def experts_per_rank(n_experts: int, ep_size: int) -> int:
    """Return E/R.

    Raises:
        UsageError: If the experts cannot be spread evenly over the emulated ranks.
    """
    if n_experts % ep_size:
        fits = [r for r in range(1, n_experts + 1) if n_experts % r == 0]
        raise UsageError(
            f"ep_size={ep_size}: {n_experts} experts cannot be spread evenly over {ep_size} ranks; "
            f"choose one of {', '.join(map(str, fits))}"
        )
    return n_experts // ep_size


@dataclass(frozen=True)
class TokenGroups:
    """Which rows of a flattened batch count, and whose capacity each of them uses.

    Attributes:
        rows_T: Rows of the counted tokens in the flattened [B·S] batch, ascending.
        group_T: Capacity group of each counted token, ascending.
        rank_T: Emulated rank of each counted token.
        tokens: Counted tokens of each of the G groups (on the host, so that capacities are
            computed without waiting for a device).
        n_rows: N = B·S.
    """

    rows_T: Tensor
    group_T: Tensor
    rank_T: Tensor
    tokens: tuple[int, ...]
    n_rows: int

    @property
    def n_groups(self) -> int:
        """Number of capacity groups G."""
        return len(self.tokens)

    @property
    def n_tokens(self) -> int:
        """Number of counted tokens T over all groups."""
        return sum(self.tokens)

    def to(self, device: torch.device) -> TokenGroups:
        """Return the groups with their tensors on ``device``."""
        if self.rows_T.device == device:
            return self
        return TokenGroups(
            self.rows_T.to(device),
            self.group_T.to(device),
            self.rank_T.to(device),
            self.tokens,
            self.n_rows,
        )


def group_tokens(counted_BS: Tensor, *, ep_size: int = 1, scope: str = "batch") -> TokenGroups:
    """Spread the sequences of a batch over emulated ranks and form the capacity groups.

    Sequence b of B goes to rank ``floor(b·R/B)`` (contiguous blocks, as data parallelism would).
    With ``scope="batch"`` a rank is one group (paper §4, Figure 3: the *local* capacity), with
    ``scope="sequence"`` every sequence is one.

    Args:
        counted_BS: Boolean [B, S]; True where the token counts in T and takes slots.
        ep_size: Number of emulated ranks R.
        scope: ``batch`` or ``sequence``.
    """
    n_sequences, n_positions = counted_BS.shape
    device = counted_BS.device
    rank_B = torch.arange(n_sequences, device=device) * ep_size // n_sequences
    group_B = rank_B if scope == "batch" else torch.arange(n_sequences, device=device)
    n_groups = ep_size if scope == "batch" else n_sequences
    tokens_G = torch.zeros(n_groups, dtype=torch.long, device=device)
    tokens_G.scatter_add_(0, group_B, counted_BS.sum(dim=1))
    rows_T = counted_BS.reshape(-1).nonzero().squeeze(1)
    sequence_T = rows_T // max(n_positions, 1)
    return TokenGroups(
        rows_T=rows_T,
        group_T=group_B[sequence_T],
        rank_T=rank_B[sequence_T],
        tokens=tuple(tokens_G.tolist()),
        n_rows=n_sequences * n_positions,
    )
