"""Define with loops what OEA, XShare and SERE share, and decide a small problem."""

from __future__ import annotations

import torch

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.routing.problems import assign, kept_pairs
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


# Three tokens, K = 2. The tokens' best experts are 0, 0 and 2; the second best 1, 3 and 1.
SCORE = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.6, 0.05, 0.1, 0.25], [0.05, 0.3, 0.4, 0.25]])
SCORES = Scores(SCORE, SCORE.topk(2, dim=1).indices)


def kept(method: Method, scores: Scores = SCORES) -> list[tuple[int, int]]:
    """Return the pairs that a method keeps of tokens of one group."""
    groups = group_tokens(torch.ones(1, len(scores.score_TE), dtype=torch.bool))
    return sorted(kept_pairs(assign(scores, method, groups)))


def decide_masked(method: Method) -> list[tuple[int, int]]:
    """Return the pairs that are kept where masks rule experts out for tokens.

    The tokens' best experts are 0, 0 and 2; the second may not use 2, the next best for it.
    """
    scores = Scores(
        torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.3, 0.2, 0.4, 0.1], [0.1, 0.1, 0.5, 0.3]]),
        torch.tensor([[0, 2], [0, 1], [2, 3]]),
        eligible_TE=torch.tensor(
            [[True] * 4, [True, True, False, False], [False, False, True, True]]
        ),
    )
    return kept(method, scores)
