"""Define the methods of the paper with loops; the tests compare the tensor code with it.

It works on Python lists, so that a definition depends on no behaviour of a tensor library (ties,
sorting, precision).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from capmoe_eval.routing.method import Bounded, Capped, Method
from capmoe_eval.routing.methods.baseline import Baseline, ExpertDrop
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.methods.token_drop import DropMetric
from capmoe_eval.routing.methods.token_reroute import TokenReroute

Pair = tuple[int, int]  # (token, expert)
Order = Callable[[Pair], float]  # of two pairs that with the smaller number is kept first
Definition = Callable[["Problem", Any], set[Pair]]
_D = TypeVar("_D", bound=Definition)

DEFINITIONS: dict[type[Method], Definition] = {}


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
    calibrated: Any = None  # what a calibration measured of the layer, as lists

    @property
    def n_experts(self) -> int:
        """Number of routed experts E."""
        return len(self.score[0])

    @property
    def chosen(self) -> set[Pair]:
        """The pairs of the router's own choice."""
        return {(t, e) for t, topk in enumerate(self.topk) for e in topk}


def definition(*methods: type[Method]) -> Callable[[_D], _D]:
    """Register the definition of methods."""

    def register(rule: _D) -> _D:
        DEFINITIONS.update(dict.fromkeys(methods, rule))
        return rule

    return register


def has_loops(method: Method) -> bool:
    """Return whether the method is one of the paper, whose definition is here."""
    return any(kind in DEFINITIONS for kind in type(method).__mro__)


def assign_reference(problem: Problem, method: Method) -> set[Pair]:
    """Return the kept (token, expert) pairs."""
    kind = next(kind for kind in type(method).__mro__ if kind in DEFINITIONS)
    return DEFINITIONS[kind](problem, method)


@definition(Baseline)
def _baseline(problem: Problem, method: Baseline) -> set[Pair]:
    return problem.chosen


@definition(DropMetric)
def _drop_metric(problem: Problem, method: DropMetric) -> set[Pair]:
    orders: dict[str, Order] = {
        "order": lambda pair: pair[0],
        "reverse_order": lambda pair: -pair[0],
        "random": lambda pair: problem.random[pair[0]][pair[1]],
    }
    return keep(problem, method, problem.chosen, orders.get(method.name, by_score(problem)))


@definition(ExpertDrop)
def _expert_drop(problem: Problem, method: ExpertDrop) -> set[Pair]:
    chosen = problem.chosen
    load = [sum(1 for _, e in chosen if e == expert) for expert in range(problem.n_experts)]
    by_load = sorted(range(problem.n_experts), key=lambda expert: (load[expert], expert))
    disabled = by_load[: max(1, math.floor(Fraction(1, 10) * problem.n_experts))]
    return {(t, e) for t, e in chosen if e not in disabled}


@definition(ExpandedDrop)
def _expanded_drop(problem: Problem, method: ExpandedDrop) -> set[Pair]:
    chosen = problem.chosen
    added = {
        (t, e) for t in range(len(problem.topk)) for e in _added_candidates(problem, method, t)
    }
    protected = chosen if method.protect_topk else chosen | added
    kept = keep(problem, method, chosen | added, by_score(problem), protected)
    if not method.max_k:
        return kept
    order = _priority(problem, method, by_score(problem), protected)
    best_first = sorted(kept, key=order)
    return {
        pair
        for t, topk in enumerate(problem.topk)
        for pair in [pair for pair in best_first if pair[0] == t][: len(topk)]
    }


def _added_candidates(problem: Problem, method: ExpandedDrop, token: int) -> list[int]:
    others = [e for e in best_first(problem, token) if e not in problem.topk[token]]
    return {
        "ranked": others[: method.m],
        "local": [e for e in others if rank_of(problem, method, e) == problem.rank[token]],
        "global": others,
    }[method.candidates]


@definition(TokenReroute)
def _token_reroute(problem: Problem, method: TokenReroute) -> set[Pair]:
    rejected: set[Pair] = set()
    kept: set[Pair] = set()
    for _ in range(method.rounds):
        selected: set[Pair] = set()
        for token, topk in enumerate(problem.topk):
            remaining = [e for e in best_first(problem, token) if (token, e) not in rejected]
            selected |= {(token, e) for e in remaining[: len(topk)]}
        kept = keep(problem, method, selected, by_score(problem))
        rejected |= selected - kept
    return kept


def by_score(problem: Problem) -> Order:
    """Return the order in which the highest gate score is the first."""
    return lambda pair: -problem.score[pair[0]][pair[1]]


def best_first(problem: Problem, token: int) -> list[int]:
    """Return a token's top-k, then the other eligible experts, each by ranking and then index."""
    topk, eligible = problem.topk[token], problem.eligible[token]

    def key(expert: int) -> tuple[bool, bool, float, int]:
        return expert not in topk, not eligible[expert], -problem.choice[token][expert], expert

    return sorted((e for e in range(problem.n_experts) if e in topk or eligible[e]), key=key)


def rank_of(problem: Problem, method: Method, expert: int) -> int:
    """Return the rank that holds an expert."""
    if not method.is_placed:
        return expert // (problem.n_experts // method.ep_size)
    return next(rank for rank, held in enumerate(problem.calibrated) if expert in held)


def capacity(problem: Problem, method: Capped, group: int) -> int | None:
    """Return the capacity of a unit in a group of tokens; None for no capacity."""
    gamma = method.factor.uniform
    assert gamma is not None
    if gamma == math.inf:
        return None
    sharing = 1 if method.granularity == "expert" else problem.n_experts // method.ep_size
    tokens = sum(1 for g in problem.group if g == group)
    mean_load = Fraction(tokens * len(problem.topk[0]), problem.n_experts)
    exact = sharing * Fraction(repr(gamma)) * mean_load
    return math.ceil(exact) if method.rounding == "ceil" else math.floor(exact)


def keep(
    problem: Problem,
    method: Bounded,
    candidates: set[Pair],
    order: Order,
    protected: set[Pair] | None = None,
) -> set[Pair]:
    """Return the pairs that each unit keeps within its capacity; ``protected`` go first."""

    def unit_of(expert: int) -> int:
        return expert if method.granularity == "expert" else rank_of(problem, method, expert)

    priority = _priority(problem, method, order, candidates if protected is None else protected)
    kept: set[Pair] = set()
    for group in sorted(set(problem.group)):
        for unit in sorted({unit_of(e) for _, e in candidates}):
            bucket = [
                (t, e) for t, e in candidates if problem.group[t] == group and unit_of(e) == unit
            ]
            bucket.sort(key=priority)
            kept |= set(bucket[: capacity(problem, method, group)])
    return kept


def _priority(
    problem: Problem, method: Bounded, order: Order, protected: set[Pair]
) -> Callable[[Pair], tuple[float, ...]]:
    """Return the sort key of pairs; the pair with the smallest key is kept first."""

    def key(pair: Pair) -> tuple[float, ...]:
        token, expert = pair
        dropped_first = {
            "uniform": False,
            "image_first": problem.image[token],
            "text_first": not problem.image[token],
        }[method.modality]
        return (dropped_first, pair not in protected, order(pair), token, expert)

    return key
