"""Define the methods of the paper with loops; the tests compare the tensor code with it.

It works on Python lists, so that a definition depends on no behaviour of a tensor library (ties,
sorting, precision).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np

from capmoe_eval.routing.definition import RoutedTokens, by_chance
from capmoe_eval.routing.method import Bounded, Capped, Method
from capmoe_eval.routing.methods.baseline import Baseline, ExpertDrop
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.methods.token_drop import DropMetric, RandomDrop
from capmoe_eval.routing.methods.token_reroute import TokenReroute

Pair = tuple[int, int]  # (token, expert)
Order = Callable[[Pair], float]  # of two pairs that with the smaller number is kept first
Lists = Any  # RoutedTokens whose arrays are lists, with n_experts, chosen pairs, random numbers


def assign_reference(tokens: RoutedTokens, method: Method) -> set[Pair] | None:
    """Return the kept (token, expert) pairs; None for a method of another paper."""
    rule = next((DEFINITIONS[kind] for kind in DEFINITIONS if isinstance(method, kind)), None)
    if rule is None:
        return None
    arrays = {name: of for name, of in vars(tokens).items() if isinstance(of, np.ndarray)}
    lists = vars(tokens) | {name: array.tolist() for name, array in arrays.items()}
    lists["n_experts"] = tokens.n_experts
    lists["chosen"] = {(t, e) for t, experts in enumerate(lists["topk_TK"]) for e in experts}
    if isinstance(method, RandomDrop):
        lists["random_TE"] = by_chance(tokens, method.seed).tolist()
    return rule(SimpleNamespace(**lists), method)


def _baseline(tokens: Lists, method: Baseline) -> set[Pair]:
    return tokens.chosen


def _drop_metric(tokens: Lists, method: DropMetric) -> set[Pair]:
    orders: dict[str, Order] = {
        "order": lambda pair: pair[0],
        "reverse_order": lambda pair: -pair[0],
        "random": lambda pair: tokens.random_TE[pair[0]][pair[1]],
    }
    return keep(tokens, method, tokens.chosen, orders.get(method.name, by_score(tokens)))


def _expert_drop(tokens: Lists, method: ExpertDrop) -> set[Pair]:
    chosen = tokens.chosen
    load = [sum(1 for _, e in chosen if e == expert) for expert in range(tokens.n_experts)]
    by_load = sorted(range(tokens.n_experts), key=lambda expert: (load[expert], expert))
    disabled = by_load[: max(1, math.floor(Fraction(1, 10) * tokens.n_experts))]
    return {(t, e) for t, e in chosen if e not in disabled}


def _expanded_drop(tokens: Lists, method: ExpandedDrop) -> set[Pair]:
    chosen = tokens.chosen
    added = {
        (t, e) for t in range(len(tokens.topk_TK)) for e in _added_candidates(tokens, method, t)
    }
    protected = chosen if method.protect_topk else chosen | added
    kept = keep(tokens, method, chosen | added, by_score(tokens), protected)
    if not method.max_k:
        return kept
    order = _priority(tokens, method, by_score(tokens), protected)
    best_first = sorted(kept, key=order)
    return {
        pair
        for t, topk in enumerate(tokens.topk_TK)
        for pair in [pair for pair in best_first if pair[0] == t][: len(topk)]
    }


def _added_candidates(tokens: Lists, method: ExpandedDrop, token: int) -> list[int]:
    others = [e for e in best_first(tokens, token) if e not in tokens.topk_TK[token]]
    return {
        "ranked": others[: method.m],
        "local": [e for e in others if rank_of(tokens, method, e) == tokens.rank_T[token]],
        "global": others,
    }[method.candidates]


def _token_reroute(tokens: Lists, method: TokenReroute) -> set[Pair]:
    rejected: set[Pair] = set()
    kept: set[Pair] = set()
    for _ in range(method.rounds):
        selected: set[Pair] = set()
        for token, topk in enumerate(tokens.topk_TK):
            remaining = [e for e in best_first(tokens, token) if (token, e) not in rejected]
            selected |= {(token, e) for e in remaining[: len(topk)]}
        kept = keep(tokens, method, selected, by_score(tokens))
        rejected |= selected - kept
    return kept


def by_score(tokens: Lists) -> Order:
    """Return the order in which the highest gate score is the first."""
    return lambda pair: -tokens.score_TE[pair[0]][pair[1]]


def best_first(tokens: Lists, token: int) -> list[int]:
    """Return a token's top-k, then the other eligible experts, each by ranking and then index."""
    topk, eligible = tokens.topk_TK[token], tokens.eligible_TE[token]

    def key(expert: int) -> tuple[bool, bool, float, int]:
        return expert not in topk, not eligible[expert], -tokens.ranking_TE[token][expert], expert

    return sorted((e for e in range(tokens.n_experts) if e in topk or eligible[e]), key=key)


def rank_of(tokens: Lists, method: Method, expert: int) -> int:
    """Return the rank that holds an expert."""
    if not method.is_placed:
        return expert // (tokens.n_experts // method.ep_size)
    return next(rank for rank, held in enumerate(tokens.calibrated) if expert in held)


def capacity(tokens: Lists, method: Capped, group: int) -> int | None:
    """Return the capacity of a unit in a group of tokens; None for no capacity."""
    gamma = method.factor.uniform
    assert gamma is not None
    if gamma == math.inf:
        return None
    sharing = 1 if method.granularity == "expert" else tokens.n_experts // method.ep_size
    n_tokens = sum(1 for g in tokens.group_T if g == group)
    mean_load = Fraction(n_tokens * len(tokens.topk_TK[0]), tokens.n_experts)
    exact = sharing * Fraction(repr(gamma)) * mean_load
    return math.ceil(exact) if method.rounding == "ceil" else math.floor(exact)


def keep(
    tokens: Lists,
    method: Bounded,
    candidates: set[Pair],
    order: Order,
    protected: set[Pair] | None = None,
) -> set[Pair]:
    """Return the pairs that each unit keeps within its capacity; ``protected`` go first."""

    def unit_of(expert: int) -> int:
        return expert if method.granularity == "expert" else rank_of(tokens, method, expert)

    priority = _priority(tokens, method, order, candidates if protected is None else protected)
    kept: set[Pair] = set()
    for group in sorted(set(tokens.group_T)):
        for unit in sorted({unit_of(e) for _, e in candidates}):
            bucket = [
                (t, e) for t, e in candidates if tokens.group_T[t] == group and unit_of(e) == unit
            ]
            bucket.sort(key=priority)
            kept |= set(bucket[: capacity(tokens, method, group)])
    return kept


def _priority(
    tokens: Lists, method: Bounded, order: Order, protected: set[Pair]
) -> Callable[[Pair], tuple[float, ...]]:
    """Return the sort key of pairs; the pair with the smallest key is kept first."""

    def key(pair: Pair) -> tuple[float, ...]:
        token, expert = pair
        dropped_first = {
            "uniform": False,
            "image_first": tokens.image_T[token],
            "text_first": not tokens.image_T[token],
        }[method.modality]
        return (dropped_first, pair not in protected, order(pair), token, expert)

    return key


DEFINITIONS: dict[type[Method], Callable[[Lists, Any], set[Pair]]] = {
    Baseline: _baseline,
    DropMetric: _drop_metric,
    ExpertDrop: _expert_drop,
    ExpandedDrop: _expanded_drop,
    TokenReroute: _token_reroute,
}
