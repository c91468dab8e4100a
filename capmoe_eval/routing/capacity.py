"""Compute the capacity C of an expert, or of a device; this needs no torch."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from capmoe_eval.errors import UsageError


@functools.lru_cache(maxsize=4096)  # exact fractions are slow, and every layer needs the same
def capacity(
    gamma: float,
    tokens: int,
    top_k: int,
    n_experts: int,
    *,
    rounding: str = "ceil",
    experts: int = 1,
) -> int:
    """Return the capacity C: the most pairs that a group of tokens may send to an expert or device.

    ``C = ceil(γ·T·K/E)`` for one expert (paper §4, ``C = γ·N̄``), ``ceil(n·γ·T·K/E)`` for a device
    of n experts (paper §5.2). γ is parsed exactly: γ=1.1 of 100 is 110, where binary fractions
    would give 111. C is at most n·T, because an expert computes a token at most once.

    Args:
        gamma: Capacity factor γ ≥ 0; ``inf`` for no capacity.
        tokens: Counted tokens T of the group.
        top_k: Experts K per token.
        n_experts: Routed experts E.
        rounding: ``ceil`` or ``floor`` (Algorithms 1 and 2).
        experts: Number of experts n that share the capacity.
    """
    if gamma == math.inf:
        return experts * tokens
    numerator, denominator = exact_ratio(gamma)
    pairs = rounded(numerator * experts * tokens * top_k, denominator * n_experts, rounding)
    return min(pairs, experts * tokens)


def exact_ratio(number: float) -> tuple[int, int]:
    """Return the exact numerator and denominator of a number's shortest decimal."""
    return Fraction(repr(float(number))).as_integer_ratio()


def rounded(numerator: int, denominator: int, rounding: str = "ceil") -> int:
    """Return ``numerator / denominator`` in whole numbers, rounded up or down."""
    return -(-numerator // denominator) if rounding == "ceil" else numerator // denominator


def experts_per_rank(n_experts: int, ranks: int, field: str = "ep_size") -> int:
    """Return E/R, the number of experts on a rank; ``field`` is the setting that R comes from.

    Raises:
        UsageError: If the experts cannot be spread evenly over the ranks.
    """
    if ranks < 1 or n_experts % ranks:
        fits = [r for r in range(1, n_experts + 1) if n_experts % r == 0]
        raise UsageError(
            f"{field}={ranks}: {n_experts} experts cannot be spread evenly over {ranks} ranks; "
            f"choose one of {', '.join(map(str, fits))}"
        )
    return n_experts // ranks
