"""Define LASER with loops."""

from __future__ import annotations

import math

from tests.routing.reference import Pair, Problem, definition

from capmoe_methods.laser import Laser


@definition(Laser)
def laser(problem: Problem, method: Laser) -> set[Pair]:
    """Return the pairs of tokens and the experts that they are assigned to."""
    pairs = set()
    for group in set(problem.group):
        members = [token for token, of in enumerate(problem.group) if of == group]
        parts = min(method.load_updates, len(members))
        load = [0] * problem.n_experts
        for part in range(parts):
            before = tuple(load)
            for place, token in enumerate(members):
                if place * parts // len(members) != part:
                    continue
                order = _own_order(problem, token)
                pool = _candidates(problem, method, token)
                ranked = sorted((before[expert], order.index(expert), expert) for expert in pool)
                for _, _, expert in ranked[: len(problem.topk[token])]:
                    pairs.add((token, expert))
                    load[expert] += 1
    return pairs


def _own_order(problem: Problem, token: int) -> list[int]:
    """Return the experts from best to worst: the router's own choice, then the eligible ones."""
    topk, eligible, choice = (of[token] for of in (problem.topk, problem.eligible, problem.choice))
    return sorted(
        range(problem.n_experts), key=lambda e: (e not in topk, not eligible[e], -choice[e], e)
    )


def _candidates(problem: Problem, method: Laser, token: int) -> set[int]:
    """Return the experts that a token may be assigned to."""
    score, topk = problem.score[token], set(problem.topk[token])
    # Whole multiples of 2^-40, so that the sum does not depend on the order of experts.
    unit = [math.floor(one * 2**40) for one in score]
    if sum(unit[expert] for expert in topk) >= method.peak_mass * sum(unit):
        return topk
    least, eligible = method.viable_score * max(score), problem.eligible[token]
    return topk | {e for e, one in enumerate(score) if eligible[e] and one >= least}
