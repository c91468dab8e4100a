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
    """The effect of one capacity factor on one layer in one step."""

    dropped: int
    slots: int
    fullest: int  # pairs of the fullest rank
    dropped_score: dict[str, float]  # by keeper


def count_step(
    experts: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    *,
    gamma: float,
    n_experts: int,
    placed: Sequence[Sequence[int]],
    of_devices: bool = False,
) -> StepCounts:
    """Count what is dropped of the tokens of a step, token by token.

    ``experts[t]`` are the experts of token t, ``scores[t]`` their gate scores; ``placed`` has the
    experts in the slots of every rank. A token's pairs come in the order of their experts. An
    expert's first pair goes to its first slot, the next to its next, and in turn again. A capacity
    is of every slot, of which each expert then has one, or (``of_devices``) of every rank, whose
    slots share it.
    """
    n_experts_bound = Fraction(n_experts, len(placed)) if of_devices else 1
    exact = Fraction(repr(gamma)) * n_experts_bound * len(experts) * len(experts[0]) / n_experts
    limit = min(math.ceil(exact), (len(placed[0]) if of_devices else 1) * len(experts))
    slots = [(rank, slot) for rank, held in enumerate(placed) for slot in range(len(held))]
    pairs: dict[tuple[int, int], list[tuple[int, float]]] = {slot: [] for slot in slots}
    turns, number = [0] * n_experts, 0
    for chosen, gates in zip(experts, scores, strict=True):
        for expert, score in sorted(zip(chosen, gates, strict=True)):
            places = [(rank, slot) for rank, slot in slots if placed[rank][slot] == expert]
            pairs[places[turns[expert] % len(places)]].append((number, score))
            turns[expert] += 1
            number += 1
    buckets = [
        [(*pair, slot) for slot in slots if slot[0] == rank for pair in pairs[slot]]
        for rank in range(len(placed))
    ]
    if not of_devices:
        buckets = [[(*pair, slot) for pair in pairs[slot]] for slot in slots]
    after = [0] * len(placed)
    dropped, lost = 0, {"score": 0.0, "order": 0.0, "random": 0.0}
    for bucket in buckets:
        kept = min(len(bucket), limit)
        dropped += len(bucket) - kept
        in_order = sorted(bucket)
        by_score = sorted(in_order, key=lambda pair: -pair[1])  # of equal scores the first
        for keeper, ordered in (("order", in_order), ("score", by_score)):
            lost[keeper] += sum(score for _, score, _ in ordered[kept:])
        if bucket:
            after[bucket[0][2][0]] += kept
            mass = sum(score for _, score, _ in bucket)
            lost["random"] += mass * (len(bucket) - kept) / len(bucket)
    return StepCounts(dropped, limit * len(buckets), max(after), lost)
