"""Define with loops what a capacity does to a trace; the tests compare the array code with it.

Nothing at run time uses this module. It works on Python lists, one step and one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class StepCounts:
    """What one capacity factor does to one layer in one step."""

    dropped: int
    slots: int
    fullest_before: int  # pairs of the fullest rank
    fullest_after: int
    dropped_score: dict[str, float]


def count_step(
    experts: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    *,
    gamma: float,
    n_experts: int,
    ranks: int,
    rounding: str = "ceil",
    size: int = 1,
) -> StepCounts:
    """Count what is dropped of the tokens of a step, token by token.

    ``experts[t]`` are the experts of token t, ``scores[t]`` their gate scores. So many (``size``)
    consecutive experts share a capacity; a token's pairs come in the order of their experts.
    """
    exact = Fraction(repr(gamma)) * size * len(experts) * len(experts[0]) / n_experts
    whole = math.ceil(exact) if rounding == "ceil" else math.floor(exact)
    limit = min(whole, size * len(experts))
    before, after = [0] * ranks, [0] * ranks
    dropped, lost = 0, {"score": 0.0, "order": 0.0, "random": 0.0}
    for bucket in range(n_experts // size):
        in_order = [
            score
            for chosen, given in zip(experts, scores, strict=True)
            for each, score in sorted(zip(chosen, given, strict=True))
            if each // size == bucket
        ]
        load = len(in_order)
        kept = min(load, limit)
        rank = bucket * size // (n_experts // ranks)
        before[rank] += load
        after[rank] += kept
        dropped += load - kept
        lost["order"] += sum(in_order[kept:])
        lost["score"] += sum(sorted(in_order, reverse=True)[kept:])
        lost["random"] += sum(in_order) * (load - kept) / load if load else 0.0
    return StepCounts(dropped, limit * (n_experts // size), max(before), max(after), lost)
