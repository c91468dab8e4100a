"""Split the tokens of an expert over its replicas, step by step.

``reference.py`` has the rounding as a loop, and the program's optimum by another theorem.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike

from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.serving.placement.layout import Amounts, Counts, Placement, checked_pairs

# Shape suffixes: S steps, L layers, E experts, R ranks, P = R·N slots, V variables: the slots of
# experts with several, H such experts.

Values = TypeVar("Values", Amounts, Counts)

Split = Literal["round_robin", "lp"]
"""The ways to choose among replicas, in whole tokens.

``round_robin`` deals in turn (vLLM, by a token's position); ``lp`` minimises the fullest rank's
load of every step (LPLB), with shares made whole by the largest remainder.
"""

_STEPS: Final = 50  # of one program: many small ones in one call are twenty times as fast


def split_tokens(load_SLE: ArrayLike, placement: Placement, split: Split) -> Counts:
    """Return the pairs that are computed in each slot [S, L, P]; they sum to the experts' loads.

    Raises:
        UsageError: For loads of another shape than the placement, or another split.
    """
    check_choice("split", split, get_args(Split))
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    if load_SLE.shape[1:] != (placement.layers, placement.n_experts):
        raise UsageError(
            f"load_SLE has shape {load_SLE.shape}: the placement has {placement.layers} layers of "
            f"{placement.n_experts} experts; give loads of the same"
        )
    if not placement.redundant:
        return by_slot(load_SLE, placement)
    if split == "lp":
        return _whole(program_shares(load_SLE, placement), load_SLE, placement)
    each_SLE: Counts = load_SLE // placement.replicas_LE
    more_SLE: Counts = load_SLE % placement.replicas_LE
    is_first_SLP = placement.turn_LP < by_slot(more_SLE, placement)  # which take one more
    tokens_SLP: Counts = by_slot(each_SLE, placement) + is_first_SLP
    return tokens_SLP


def rank_loads(load_SLE: ArrayLike, placement: Placement) -> Counts:
    """Return the pairs that each rank computes [S, L, R], if replicas take whole tokens in turn."""
    tokens_SLP = split_tokens(load_SLE, placement, "round_robin")
    rank_SLR: Counts = tokens_SLP.reshape(*tokens_SLP.shape[:2], placement.ranks, -1).sum(axis=3)
    return rank_SLR


def slots_in_turn(expert_P: Counts, step_P: Counts, placement: Placement, layer: int) -> Counts:
    """Return the slot that computes each pair [P] of a layer, if replicas take pairs in turn.

    The i-th pair of an expert in a step goes to its (i mod n)-th slot, of n from the first rank to
    the last: which pairs that are, ``round_robin`` leaves open, and how many is the same.

    Args:
        expert_P: The expert of every pair, in the order of the tokens.
        step_P: The step of every pair, from 0, non-decreasing.
        placement: The placement.
        layer: The layer.
    """
    slot_P: Counts
    by_expert_P = placement.by_expert_LP[layer]
    if not placement.redundant:
        slot_P = by_expert_P[expert_P]
        return slot_P
    slots_E = placement.replicas_LE[layer]
    first_E = slots_E.cumsum() - slots_E
    group_P = step_P * placement.n_experts + expert_P
    size_G = np.bincount(group_P)
    short_P = group_P.astype(np.min_scalar_type(len(size_G)))  # short integers sort faster
    order_P = np.argsort(short_P, kind="stable")
    turn_P = np.empty(len(group_P), dtype=np.int64)
    turn_P[order_P] = np.arange(len(group_P)) - np.repeat(size_G.cumsum() - size_G, size_G)
    slot_P = by_expert_P[first_E[expert_P] + turn_P % slots_E[expert_P]]
    return slot_P


def by_slot(values_SLE: Values, placement: Placement) -> Values:
    """Return the value of the expert in every slot [S, L, P]."""
    if np.array_equal(placement.expert_LP, np.indices(values_SLE.shape[1:])[1]):  # in blocks
        return values_SLE
    return np.take_along_axis(values_SLE, placement.expert_LP[None], axis=2)


def _equal_shares(load_SLE: Counts, placement: Placement) -> Amounts:
    return by_slot(load_SLE / placement.replicas_LE, placement)


def program_shares(load_SLE: Counts, placement: Placement) -> Amounts:
    """Return the shares [S, L, P] that minimise each step's fullest rank, by programs (HiGHS).

    For each step and layer: minimise m, where the slots of an expert sum to its load and those of a
    rank to at most m. That is the program of SGLang's pull request 24515 on EPLB's replicas; that
    of https://github.com/deepseek-ai/LPLB has replicas along a fixed topology instead.
    """
    tokens_SLP = _equal_shares(load_SLE, placement)  # right where an expert has one slot
    for layer in range(placement.layers):
        expert_P = placement.expert_LP[layer]
        slot_V = np.flatnonzero(placement.replicas_LE[layer][expert_P] > 1)
        if not len(slot_V):
            continue
        rank_V = slot_V // (len(expert_P) // placement.ranks)
        expert_H = np.unique(expert_P[slot_V])
        fixed_SP = tokens_SLP[:, layer].copy()
        fixed_SP[:, slot_V] = 0.0
        fixed_SR = fixed_SP.reshape(len(fixed_SP), placement.ranks, -1).sum(axis=2)
        # Loads over the mean rank load, so that the solver's tolerances fit any step.
        mean_S1 = np.maximum(load_SLE[:, layer].sum(axis=1, keepdims=True), 1) / placement.ranks
        replica_HV = expert_P[slot_V] == expert_H[:, None]
        rank_RV = rank_V == np.arange(placement.ranks)[:, None]
        for first in range(0, len(load_SLE), _STEPS):
            part = slice(first, first + _STEPS)
            share_SV = _solve(
                replica_HV,
                rank_RV,
                load_SLE[part, layer, :][:, expert_H] / mean_S1[part],
                fixed_SR[part] / mean_S1[part],
            )
            tokens_SLP[part, layer, slot_V] = share_SV * mean_S1[part]
    return tokens_SLP


def _solve(replica_HV: Amounts, rank_RV: Amounts, load_SH: Amounts, fixed_SR: Amounts) -> Amounts:
    """Return the replicas' parts [S, V] of several steps, solved as one program of many blocks."""
    from scipy import sparse
    from scipy.optimize import linprog  # imports slowly

    steps = sparse.eye_array(len(load_SH))
    replicas, ranks = (
        np.pad(replica_HV * 1.0, ((0, 0), (0, 1))),
        np.pad(rank_RV * 1.0, ((0, 0), (0, 1)), constant_values=-1.0),
    )
    cost_V = np.append(np.zeros(replica_HV.shape[1]), 1.0)
    solved = linprog(
        np.tile(cost_V, len(load_SH)),
        A_eq=sparse.kron(steps, replicas, format="csr"),
        b_eq=load_SH.reshape(-1),
        A_ub=sparse.kron(steps, ranks, format="csr"),
        b_ub=-fixed_SR.reshape(-1),
        method="highs",
    )
    if solved.status:
        raise RuntimeError(f"the linear program of a placement was not solved: {solved.message}")
    return np.asarray(solved.x).reshape(len(load_SH), -1)[:, :-1].clip(0.0)


def _whole(tokens_SLP: Amounts, load_SLE: Counts, placement: Placement) -> Counts:
    """Return whole tokens: an expert's largest remainders go up, of equal ones the first slots'."""
    floor_SLP = np.floor(tokens_SLP + 1e-6)  # 2.9999999 of a solver is 3
    expert_LP, by_expert_LP = placement.expert_LP, placement.by_expert_LP
    first_LE = placement.replicas_LE.cumsum(axis=1) - placement.replicas_LE
    start_LE = first_LE + np.arange(placement.layers)[:, None] * expert_LP.shape[1]
    ordered_SLP = np.take_along_axis(floor_SLP, by_expert_LP[None], axis=2)
    done_SX = np.add.reduceat(ordered_SLP.reshape(len(load_SLE), -1), start_LE.ravel(), axis=1)
    open_SLP = by_slot(load_SLE - done_SX.reshape(load_SLE.shape), placement)
    remainder_SLP = (tokens_SLP - floor_SLP).round(6)
    expert_SLP = np.broadcast_to(expert_LP, tokens_SLP.shape)
    order_SLP = np.lexsort((-remainder_SLP, expert_SLP), axis=2)  # stable: the first slot first
    turn_SLP = np.empty(tokens_SLP.shape)
    place_LP = np.take_along_axis(placement.turn_LP, by_expert_LP, axis=1)
    np.put_along_axis(turn_SLP, order_SLP, np.broadcast_to(place_LP, order_SLP.shape), axis=2)
    return (floor_SLP + (turn_SLP < open_SLP)).astype(np.int64)
