"""Define with loops what OEA, XShare and SERE share."""

from __future__ import annotations

from tests.routing.reference import Pair, Problem, best_first


def best_experts(problem: Problem, k0: int) -> set[int]:
    """Return the experts that are among the k0 best of some token."""
    return {
        expert
        for token, topk in enumerate(problem.topk)
        for expert in best_first(problem, token)[: min(k0, len(topk))]
    }


def within(problem: Problem, chosen: set[int]) -> set[Pair]:
    """Return the K best pairs of each token with experts of the set, in the token's own order."""
    kept: set[Pair] = set()
    for token, topk in enumerate(problem.topk):
        usable = [expert for expert in best_first(problem, token) if expert in chosen]
        kept |= {(token, expert) for expert in usable[: len(topk)]}
    return kept
