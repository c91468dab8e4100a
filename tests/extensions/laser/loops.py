"""LASER by loops over Python lists, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """What a token's assignment depends on."""

    score: Sequence[float]
    ranking: Sequence[float]
    eligible: Sequence[bool]
    topk: Sequence[int]

    @property
    def own_order(self) -> list[int]:
        """The experts from best to worst: the router's own choice, then the eligible ones."""
        topk, eligible, ranking = self.topk, self.eligible, self.ranking
        experts = range(len(ranking))
        return sorted(experts, key=lambda e: (e not in topk, not eligible[e], -ranking[e], e))

    def candidates(self, peak_mass: float, viable_score: float) -> list[int]:
        """Return the experts that the token may be assigned to."""
        unit = [math.floor(score * 2**40) for score in self.score]
        if sum(unit[expert] for expert in self.topk) >= peak_mass * sum(unit):
            return list(self.topk)
        least = viable_score * max(self.score)
        viable = [e for e, score in enumerate(self.score) if self.eligible[e] and score >= least]
        return sorted({*self.topk, *viable})


def assigned(
    tokens: Sequence[Token],
    groups: Sequence[int],
    *,
    peak_mass: float,
    viable_score: float,
    load_updates: int,
) -> set[tuple[int, int]]:
    """Return the pairs of tokens and the experts that they are assigned to."""
    pairs = set()
    for group in set(groups):
        members = [token for token, of in enumerate(groups) if of == group]
        parts = min(load_updates, len(members))
        load = [0] * len(tokens[0].score)
        for part in range(parts):
            before = tuple(load)
            for place, token in enumerate(members):
                if place * parts // len(members) != part:
                    continue
                order = tokens[token].own_order
                pool = tokens[token].candidates(peak_mass, viable_score)
                ranked = sorted((before[expert], order.index(expert), expert) for expert in pool)
                for _, _, expert in ranked[: len(tokens[token].topk)]:
                    pairs.add((token, expert))
                    load[expert] += 1
    return pairs
