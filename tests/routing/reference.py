"""Define every method with loops; the tests compare the tensor code with it.

Nothing at run time uses this module. It works on Python lists, so that the definition depends on
no behaviour of a tensor library (ties, sorting, precision).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from capmoe_eval.routing.method import Method

Pair = tuple[int, int]  # (token, expert)


@dataclass(frozen=True)
class Problem:
    """One routing decision, as plain numbers."""

    score: Sequence[Sequence[float]]  # s[t][e], the gate scores
    choice: Sequence[Sequence[float]]  # the scores that the router ranks experts by
    eligible: Sequence[Sequence[bool]]  # False where group masking rules the expert out
    topk: Sequence[Sequence[int]]  # the router's own choice K(t)
    group: Sequence[int]  # capacity group of each token
    rank: Sequence[int]  # emulated rank of each token
    random: Sequence[Sequence[int]]  # a random number per pair, for random
    image: Sequence[bool]  # True for a token of an image
    unit: Sequence[int] = ()  # of each token, its weight in MACS as a multiple of 2⁻²⁴
    bias: Sequence[int] = ()  # of each expert, its modality in MACS: 1 visual, -1 text, 0 shared
    similarity: Sequence[Sequence[float]] = ()  # of the experts' outputs, for SERE
    home: Sequence[int] = ()  # of each expert, the rank that holds it, where it is not its block's

    @property
    def n_experts(self) -> int:
        """Number of routed experts E."""
        return len(self.score[0])


def assign_reference(problem: Problem, method: Method) -> set[Pair]:
    """Return the kept (token, expert) pairs."""
    tokens = range(len(problem.topk))
    own = {(t, e) for t in tokens for e in problem.topk[t]}
    if method.is_stock:
        return own
    if method.name == "expert_drop":
        return _expert_drop(problem, own)
    if method.name == "token_reroute":
        return _token_reroute(problem, method)
    if method.name == "macs":
        return _macs(problem, method, own)
    if method.name == "oea":
        return _within(problem, _best_experts(problem, method.k0))
    if method.name == "xshare":
        return _within(problem, _shared_experts(problem, method))
    if method.name == "sere":
        return {(t, _served_by(problem, method, e)) for t, e in own}
    candidates = own | {(t, e) for t in tokens for e in _added_candidates(problem, method, t)}
    kept = _keep(problem, method, candidates, own)
    if method.max_k:
        best_first = sorted(kept, key=_priority(problem, method, own))
        by_token = [[pair for pair in best_first if pair[0] == t] for t in tokens]
        kept = {pair for t in tokens for pair in by_token[t][: len(problem.topk[t])]}
    return kept


def _added_candidates(problem: Problem, method: Method, token: int) -> list[int]:
    others = [e for e in _best_first(problem, token) if e not in problem.topk[token]]
    return {
        "topk": [],
        "ranked": others[: method.m],
        "local": [e for e in others if _home(problem, method, e) == problem.rank[token]],
        "global": others,
    }[method.candidate_rule]


def _home(problem: Problem, method: Method, expert: int) -> int:
    """Return the rank that holds an expert."""
    if method.placement == "contiguous":
        return expert // (problem.n_experts // method.ep_size)
    return problem.home[expert]


def _best_first(problem: Problem, token: int) -> list[int]:
    """Return a token's top-k, then the other eligible experts, each by ranking and then index."""
    topk, eligible = problem.topk[token], problem.eligible[token]

    def key(expert: int) -> tuple[bool, bool, float, int]:
        return expert not in topk, not eligible[expert], -problem.choice[token][expert], expert

    return sorted((e for e in range(problem.n_experts) if e in topk or eligible[e]), key=key)


def _priority(
    problem: Problem, method: Method, own: set[Pair]
) -> Callable[[Pair], tuple[float, ...]]:
    """Return the sort key of pairs; the pair with the smallest key is kept first."""

    def key(pair: Pair) -> tuple[float, ...]:
        token, expert = pair
        first = {
            "score": -problem.score[token][expert],
            "order": token,
            "reverse_order": -token,
            "random": problem.random[token][expert],
        }[method.keep]
        dropped_first = {
            "uniform": False,
            "image_first": problem.image[token],
            "text_first": not problem.image[token],
        }[method.modality]
        added = method.protect_topk and pair not in own
        return (dropped_first, added, first, token, expert)

    return key


def _capacity(problem: Problem, method: Method, group: int) -> int | None:
    assert method.gamma is not None
    if method.gamma == math.inf:
        return None
    sharing = 1 if method.bound == "expert" else problem.n_experts // method.ep_size
    tokens = sum(1 for g in problem.group if g == group)
    mean_load = Fraction(tokens * len(problem.topk[0]), problem.n_experts)
    exact = sharing * Fraction(repr(method.gamma)) * mean_load
    return math.ceil(exact) if method.rounding == "ceil" else math.floor(exact)


def _keep(problem: Problem, method: Method, candidates: set[Pair], own: set[Pair]) -> set[Pair]:
    def unit_of(expert: int) -> int:
        return expert if method.bound == "expert" else _home(problem, method, expert)

    kept: set[Pair] = set()
    for group in sorted(set(problem.group)):
        for unit in sorted({unit_of(e) for _, e in candidates}):
            bucket = [
                (t, e) for t, e in candidates if problem.group[t] == group and unit_of(e) == unit
            ]
            bucket.sort(key=_priority(problem, method, own))
            kept |= set(bucket[: _capacity(problem, method, group)])
    return kept


def _expert_drop(problem: Problem, own: set[Pair]) -> set[Pair]:
    load = [sum(1 for _, e in own if e == expert) for expert in range(problem.n_experts)]
    by_load = sorted(range(problem.n_experts), key=lambda expert: (load[expert], expert))
    silent = by_load[: max(1, math.floor(Fraction(1, 10) * problem.n_experts))]
    return {(t, e) for t, e in own if e not in silent}


def _token_reroute(problem: Problem, method: Method) -> set[Pair]:
    rejected: set[Pair] = set()
    kept: set[Pair] = set()
    for _ in range(method.rounds):
        selected: set[Pair] = set()
        for token, topk in enumerate(problem.topk):
            remaining = [e for e in _best_first(problem, token) if (token, e) not in rejected]
            selected |= {(token, e) for e in remaining[: len(topk)]}
        kept = _keep(problem, method, selected, selected)
        rejected |= selected - kept
    return kept


def weights_reference(
    features: Sequence[Sequence[float]],
    image: Sequence[bool],
    group: Sequence[int],
    delta: float,
) -> list[float]:
    """Define the weight of every token in MACS, from the features of its hidden state."""
    entropy = []
    for row in features:
        share = [math.exp(feature - max(row)) for feature in row]
        entropy.append(-sum(s / sum(share) * math.log(s / sum(share)) for s in share if s > 0))
    weights = []
    for token, own in enumerate(entropy):
        others = [entropy[t] for t in range(len(image)) if image[t] and group[t] == group[token]]
        if not image[token]:
            weights.append(1.0)
            continue
        mean = math.fsum(others) / len(others)
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in others) / len(others))
        weights.append(1 / (1 + math.exp(delta * (own - mean) / (deviation + 1e-6))))
    return weights


def _macs(problem: Problem, method: Method, own: set[Pair]) -> set[Pair]:
    room = {
        (group, expert): _weighted_capacity(problem, method, group, expert)
        for group in set(problem.group)
        for expert in range(problem.n_experts)
    }
    kept = _until_full(problem, own, room)
    if method.reroute == "none":
        return kept
    local = problem.n_experts // method.ep_size
    asked: set[Pair] = set()
    for token, topk in enumerate(problem.topk):
        for rank in range(method.ep_size):
            lost = [e for e in topk if e // local == rank and (token, e) not in kept]
            free = [
                e
                for e in _best_first(problem, token)
                if e // local == rank
                and e not in topk
                and problem.unit[token] <= room[problem.group[token], e]
            ]
            asked |= {(token, e) for e in free[: len(lost)]}
    return kept | _until_full(problem, asked, room)


def _weighted_capacity(problem: Problem, method: Method, group: int, expert: int) -> float:
    """Return an expert's capacity as a multiple of 2⁻²⁴, or infinity."""
    members = [t for t, g in enumerate(problem.group) if g == group]
    base = _capacity(problem, method, group)
    if base is None:
        return math.inf
    of_images = sum(problem.unit[t] for t in members if problem.image[t])
    ratio = of_images / sum(problem.unit[t] for t in members)
    return math.floor(base * (1 + method.rho * problem.bias[expert] * (ratio - 0.5)) * 2**24)


def _until_full(problem: Problem, pairs: set[Pair], room: dict[Pair, float]) -> set[Pair]:
    """Give each expert its best pairs until the next would not fit, and take their weight off."""
    kept: set[Pair] = set()
    full: set[Pair] = set()
    for token, expert in sorted(pairs, key=lambda p: (-problem.score[p[0]][p[1]], p)):
        bucket = problem.group[token], expert
        if problem.unit[token] > room[bucket]:
            full.add(bucket)
        if bucket not in full:
            room[bucket] -= problem.unit[token]
            kept.add((token, expert))
    return kept


def _best_experts(problem: Problem, k0: int) -> set[int]:
    """Return the experts that are among the k0 best of some token."""
    return {
        expert
        for token, topk in enumerate(problem.topk)
        for expert in _best_first(problem, token)[: min(k0, len(topk))]
    }


def _shared_experts(problem: Problem, method: Method) -> set[int]:
    """Return XShare's set: in each unit, the best experts up to the budget."""
    units = method.ep_size if method.granularity == "device" else 1
    share = problem.n_experts // units
    budget = math.ceil(Fraction(repr(method.expert_budget)) * share)
    best = _best_experts(problem, method.k0)
    # Whole multiples of 2^-40, so that the sum does not depend on the order of tokens.
    worth = [
        sum(math.floor(row[expert] * 2**40) for row in problem.score)
        for expert in range(problem.n_experts)
    ]
    chosen: set[int] = set()
    falling = sorted(range(problem.n_experts), key=lambda e: (e not in best, -worth[e], e))
    for unit in range(units):
        held = [e for e in falling if units == 1 or _home(problem, method, e) == unit]
        chosen |= set(held[:budget])
    return chosen


def _within(problem: Problem, chosen: set[int]) -> set[Pair]:
    """Return the K best pairs of each token with experts of the set, in the token's own order."""
    kept: set[Pair] = set()
    for token, topk in enumerate(problem.topk):
        usable = [expert for expert in _best_first(problem, token) if expert in chosen]
        kept |= {(token, expert) for expert in usable[: len(topk)]}
    return kept


def _served_by(problem: Problem, method: Method, expert: int) -> int:
    """Return the expert that SERE sends the tokens of an expert to: itself, or a primary one."""
    primary = sorted(_best_experts(problem, method.k0))
    if expert in primary or not primary:
        return expert
    most = max(primary, key=lambda other: (problem.similarity[expert][other], -other))
    return most if problem.similarity[expert][most] >= method.min_similarity else expert


def sere_weights_reference(
    problem: Problem, method: Method, weight: Sequence[Sequence[float]]
) -> dict[Pair, float]:
    """Return the weight of every pair under SERE, from the router's own weights [T, K]."""
    found: dict[Pair, float] = {}
    for token, (topk, own) in enumerate(zip(problem.topk, weight, strict=True)):
        for expert, share in zip(topk, own, strict=True):
            pair = (token, _served_by(problem, method, expert))
            found[pair] = found.get(pair, 0.0) + share
    return found
