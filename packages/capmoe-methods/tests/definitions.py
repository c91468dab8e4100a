"""Define the methods of other papers with loops, and draw what their calibrations measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from capmoe_eval.routing.decision import TokenGroups
from capmoe_eval.routing.method import Method
from tests.routing.problems import calibration
from tests.routing.reference import Pair, Problem, best_first, capacity, definition, rank_of
from torch import Tensor

from capmoe_methods.laser import Laser
from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import modality_bias, token_weights
from capmoe_methods.oea import OEA
from capmoe_methods.sere import SERE
from capmoe_methods.xshare import XShare

# OEA, XShare and SERE: the experts that a batch activates.


@definition(OEA)
def oea(problem: Problem, method: OEA) -> set[Pair]:
    """Return each token's K best pairs with the best experts of all tokens."""
    return within(problem, best_experts(problem, method.k0))


@definition(XShare)
def xshare(problem: Problem, method: XShare) -> set[Pair]:
    """Return each token's K best pairs with the best experts of each unit, up to its budget."""
    units = method.ep_size if method.granularity == "device" else 1
    budget = math.ceil(Fraction(repr(method.expert_budget)) * problem.n_experts / units)
    best = best_experts(problem, method.k0)
    # Whole multiples of 2^-40, so that the sum does not depend on the order of tokens.
    worth = [
        sum(math.floor(row[expert] * 2**40) for row in problem.score)
        for expert in range(problem.n_experts)
    ]
    chosen: set[int] = set()
    falling = sorted(range(problem.n_experts), key=lambda e: (e not in best, -worth[e], e))
    for unit in range(units):
        held = [e for e in falling if units == 1 or rank_of(problem, method, e) == unit]
        chosen |= set(held[:budget])
    return within(problem, chosen)


@definition(SERE)
def sere(problem: Problem, method: SERE) -> set[Pair]:
    """Return the pairs with the experts that serve each token's top-k."""
    return {(t, served_by(problem, method, e)) for t, e in problem.chosen}


def sere_weights(
    problem: Problem, method: SERE, weight: Sequence[Sequence[float]]
) -> dict[Pair, float]:
    """Return the weight of every pair, from the router's own weights [T, K]."""
    sums: dict[Pair, float] = {}
    for token, (topk, row) in enumerate(zip(problem.topk, weight, strict=True)):
        for expert, share in zip(topk, row, strict=True):
            pair = (token, served_by(problem, method, expert))
            sums[pair] = sums.get(pair, 0.0) + share
    return sums


def served_by(problem: Problem, method: SERE, expert: int) -> int:
    """Return the expert that the tokens of an expert go to: itself, or a primary one."""
    primary = sorted(best_experts(problem, method.k0))
    if expert in primary or not primary:
        return expert
    similarity_E = problem.calibrated[expert]
    most = max(primary, key=lambda other: (similarity_E[other], -other))
    return most if similarity_E[most] >= method.min_similarity else expert


@calibration("expert_similarity")
def similarity(method: SERE, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return similarities of the experts: few distinct values, of half the layers mostly 0."""
    size, shape = 5, (n_experts, n_experts)
    drawn_EE = torch.randint(size, shape, generator=generator) / (size - 1)
    if int(torch.randint(2, (), generator=generator)):
        drawn_EE *= torch.rand(shape, generator=generator) < 0.3
    return torch.minimum(drawn_EE, drawn_EE.T).fill_diagonal_(1)


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


# LASER: the least loaded of a token's candidates.


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
    unit = [math.floor(each * 2**40) for each in score]
    if sum(unit[expert] for expert in topk) >= method.peak_mass * sum(unit):
        return topk
    least, eligible = method.viable_score * max(score), problem.eligible[token]
    return topk | {e for e, each in enumerate(score) if eligible[e] and each >= least}


# MACS: capacities by weight. Weights are whole multiples of 2⁻²⁴, as the decision has them.


@definition(MACS)
def macs(problem: Problem, method: MACS) -> set[Pair]:
    """Return the pairs that fit into the experts' capacities, and those that are rerouted."""
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


def macs_weights(
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


@calibration("expert_modalities")
def modalities(method: MACS, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts' modalities, by random frequencies and the method's threshold."""
    visual_E, text_E = torch.randint(5, (2, n_experts), generator=generator) / 4
    return modality_bias(visual_E, text_E, method.modality_threshold)


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


# A placement: which rank holds an expert is a part of every method's definition.


@calibration("expert_loads")
def placement(method: Method, n_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts of each rank, rising, drawn at random [R, E/R]."""
    order_E = torch.randperm(n_experts, generator=generator)
    return order_E.view(method.ep_size, -1).sort(dim=1).values
