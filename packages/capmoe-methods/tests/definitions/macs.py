"""Define MACS with loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from capmoe_eval.routing.decision import TokenGroups
from tests.routing.problems import calibration
from tests.routing.reference import Pair, Problem, best_first, capacity, definition
from torch import Tensor

from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import modality_bias, token_weights


@calibration("expert_modalities")
def modalities(method: MACS, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts' modalities, by random frequencies and the method's threshold."""
    visual_E, text_E = torch.randint(5, (2, n_experts), generator=generator) / 4
    return modality_bias(visual_E, text_E, method.modality_threshold)


@definition(MACS)
def macs(problem: Problem, method: MACS) -> set[Pair]:
    """Return the pairs that fit into the experts' capacities, and those that are rerouted.

    The weights of tokens are those of the decision, as whole multiples of 2⁻²⁴; `weights` defines
    them.
    """
    unit = _units(problem, method)
    remaining = {
        (group, expert): _weighted_capacity(problem, method, unit, group, expert)
        for group in set(problem.group)
        for expert in range(problem.n_experts)
    }
    kept = _until_full(problem, unit, problem.chosen, remaining)
    if method.reroute == "none":
        return kept
    local = problem.n_experts // method.ep_size
    asked: set[Pair] = set()
    for token, topk in enumerate(problem.topk):
        for rank in range(method.ep_size):
            lost = [e for e in topk if e // local == rank and (token, e) not in kept]
            free = [
                e
                for e in best_first(problem, token)
                if e // local == rank
                and e not in topk
                and unit[token] <= remaining[problem.group[token], e]
            ]
            asked |= {(token, e) for e in free[: len(lost)]}
    return kept | _until_full(problem, unit, asked, remaining)


def weights(
    features: Sequence[Sequence[float]],
    image: Sequence[bool],
    group: Sequence[int],
    delta: float,
) -> list[float]:
    """Define the weight of every token, from the features of its hidden state."""
    entropy = []
    for row in features:
        share = [math.exp(feature - max(row)) for feature in row]
        entropy.append(-sum(s / sum(share) * math.log(s / sum(share)) for s in share if s > 0))
    weight = []
    for token, value in enumerate(entropy):
        others = [entropy[t] for t in range(len(image)) if image[t] and group[t] == group[token]]
        if not image[token]:
            weight.append(1.0)
            continue
        mean = math.fsum(others) / len(others)
        deviation = math.sqrt(math.fsum((other - mean) ** 2 for other in others) / len(others))
        weight.append(1 / (1 + math.exp(delta * (value - mean) / (deviation + 1e-6))))
    return weight


def _units(problem: Problem, method: MACS) -> list[int]:
    """Return the weight of each token as a multiple of 2⁻²⁴."""
    group_T = torch.tensor(problem.group)
    tokens = tuple(group_T.bincount().tolist())
    groups = TokenGroups(torch.arange(len(group_T)), group_T, group_T, tokens, len(group_T))
    image_T, hidden_TH = torch.tensor(problem.image), torch.tensor(problem.hidden)
    return token_weights(hidden_TH, image_T, groups, method.delta).tolist()


def _weighted_capacity(
    problem: Problem, method: MACS, unit: Sequence[int], group: int, expert: int
) -> float:
    """Return an expert's capacity as a multiple of 2⁻²⁴, or infinity."""
    members = [t for t, g in enumerate(problem.group) if g == group]
    base = capacity(problem, method, group)
    if base is None:
        return math.inf
    bias = 0 if problem.calibrated is None else problem.calibrated[expert]
    ratio = sum(unit[t] for t in members if problem.image[t]) / sum(unit[t] for t in members)
    return math.floor(base * (1 + method.rho * bias * (ratio - 0.5)) * 2**24)


def _until_full(
    problem: Problem, unit: Sequence[int], pairs: set[Pair], remaining: dict[Pair, float]
) -> set[Pair]:
    """Give each expert its best pairs until the next would not fit, and take their weight off."""
    kept: set[Pair] = set()
    full: set[Pair] = set()
    for token, expert in sorted(pairs, key=lambda p: (-problem.score[p[0]][p[1]], p)):
        bucket = problem.group[token], expert
        if unit[token] > remaining[bucket]:
            full.add(bucket)
        if bucket not in full:
            remaining[bucket] -= unit[token]
            kept.add((token, expert))
    return kept
