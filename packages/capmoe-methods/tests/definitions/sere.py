"""Define SERE with loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.routing.problems import calibration
from tests.routing.reference import Pair, Problem, definition
from torch import Tensor

from capmoe_methods.sere import SERE
from definitions.activation import best_experts


@calibration("expert_similarity")
def similarity(method: SERE, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return similarities of the experts: few distinct values, of half the layers mostly 0."""
    size, shape = 5, (n_experts, n_experts)
    drawn_EE = torch.randint(size, shape, generator=generator) / (size - 1)
    if int(torch.randint(2, (), generator=generator)):
        drawn_EE *= torch.rand(shape, generator=generator) < 0.3
    return torch.minimum(drawn_EE, drawn_EE.T).fill_diagonal_(1)


@definition(SERE)
def sere(problem: Problem, method: SERE) -> set[Pair]:
    """Return the pairs with the experts that serve each token's top-k."""
    return {(t, _served_by(problem, method, e)) for t, e in problem.chosen}


def weights(problem: Problem, method: SERE, weight: Sequence[Sequence[float]]) -> dict[Pair, float]:
    """Return the weight of every pair, from the router's own weights [T, K]."""
    sums: dict[Pair, float] = {}
    for token, (topk, row) in enumerate(zip(problem.topk, weight, strict=True)):
        for expert, share in zip(topk, row, strict=True):
            pair = (token, _served_by(problem, method, expert))
            sums[pair] = sums.get(pair, 0.0) + share
    return sums


def _served_by(problem: Problem, method: SERE, expert: int) -> int:
    """Return the expert that the tokens of an expert go to: itself, or a primary one."""
    primary = sorted(best_experts(problem, method.k0))
    if expert in primary or not primary:
        return expert
    similarity_E = problem.calibrated[expert]
    most = max(primary, key=lambda other: (similarity_E[other], -other))
    return most if similarity_E[most] >= method.min_similarity else expert
