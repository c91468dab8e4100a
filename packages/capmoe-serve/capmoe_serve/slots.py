"""Put experts into the slots of ranks, and split an expert's tokens over its slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeVar, get_args

import numpy as np
from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.routing.capacity import experts_per_rank
from numpy.typing import ArrayLike, NDArray

# Shape suffixes: S steps, L layers, E experts, R ranks, N slots of a rank, P = R·N slots, V
# variables: the slots of experts with several, H such experts.

Counts = NDArray[np.int64]
Amounts = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The expert in every slot: R ranks have N slots each, in every layer.

    ``expert_LRN.reshape(L, -1)`` is the ``physical_to_logical_map`` of EPLB, vLLM and SGLang.

    Raises:
        UsageError: If a slot holds no expert, or an expert has no slot.
    """

    expert_LRN: Counts
    n_experts: int

    def __post_init__(self) -> None:
        expert_LRN = checked_pairs("expert_LRN", self.expert_LRN, "LRN")
        if (highest := expert_LRN.max()) >= self.n_experts:
            raise UsageError(f"expert_LRN={highest}: must be from 0 to {self.n_experts - 1}")
        object.__setattr__(self, "expert_LRN", expert_LRN)
        lost = np.argwhere(self.replicas_LE == 0)
        if len(lost):
            layer, missing = lost[0]
            raise UsageError(
                f"expert_LRN: expert {missing} has no slot in layer {layer}; give every expert one"
            )

    @property
    def layers(self) -> int:
        """Number of MoE layers L."""
        return len(self.expert_LRN)

    @property
    def ranks(self) -> int:
        """Number of ranks R."""
        return int(self.expert_LRN.shape[1])

    @property
    def redundant(self) -> int:
        """Slots of a layer beyond one for each expert: R·N − E."""
        return int(self.expert_LRN[0].size) - self.n_experts

    @property
    def expert_LP(self) -> Counts:
        """The expert in every slot, rank after rank."""
        return self.expert_LRN.reshape(self.layers, -1)

    @cached_property
    def replicas_LE(self) -> Counts:
        """Number of slots that each expert has."""
        return np.stack([np.bincount(row, minlength=self.n_experts) for row in self.expert_LP])

    @cached_property
    def by_expert_LP(self) -> Counts:
        """The slots in the order of their experts, and those of an expert in turn."""
        return np.argsort(self.expert_LP, axis=1, kind="stable")

    @cached_property
    def turn_LP(self) -> Counts:
        """The number of each slot among those of its expert, from 0."""
        first_LE = self.replicas_LE.cumsum(axis=1) - self.replicas_LE
        sorted_LP = np.take_along_axis(self.expert_LP, self.by_expert_LP, axis=1)
        place_LP = np.arange(sorted_LP.shape[1]) - np.take_along_axis(first_LE, sorted_LP, axis=1)
        turn_LP = np.empty_like(place_LP)
        np.put_along_axis(turn_LP, self.by_expert_LP, place_LP, axis=1)
        return turn_LP

    @property
    def held_LRE(self) -> NDArray[np.bool_]:
        """True where a rank holds an expert."""
        held = np.zeros((self.layers, self.ranks, self.n_experts), dtype=bool)
        np.put_along_axis(held, self.expert_LRN, True, axis=2)
        return held

    def moved_from(self, other: SlotPlan) -> Counts:
        """Return the weights of experts to send so that this placement follows ``other`` [L].

        A rank needs those of its experts that it did not hold before, each once.
        """
        new_LRE = self.held_LRE & ~other.held_LRE
        return np.asarray(new_LRE.sum(axis=(1, 2)), dtype=np.int64)


def contiguous(layers: int, n_experts: int, ranks: int, slots: int | None = None) -> SlotPlan:
    """Return the placement that servers begin with: the experts in order, rank after rank.

    Without ``slots`` it is the paper's: rank r holds the experts r·E/R to (r+1)·E/R − 1, each once.
    With more slots on a rank, the first experts stand again behind the last one, as in vLLM
    (``build_initial_global_physical_to_logical_map`` of ``vllm/distributed/eplb/eplb_state.py``).

    Raises:
        UsageError: If E does not divide by R, without ``slots``; or they have no space for E.
    """
    if slots is None:
        slots = experts_per_rank(n_experts, ranks, "ranks")
    expert_RN = (np.arange(ranks * slots, dtype=np.int64) % n_experts).reshape(ranks, slots)
    return SlotPlan(np.tile(expert_RN, (layers, 1, 1)), n_experts)


def checked_loads(field: str, load: ArrayLike, shape: str, *, whole: bool = False) -> Amounts:
    """Return loads, numbers of pairs or means of them, as an array.

    ``field`` is the name of the argument, for the error, and ``shape`` its axes as letters, such as
    ``SLE``; ``whole`` refuses other types than integers.

    Raises:
        UsageError: For other axes or an empty one, and for what is no load.
    """
    array = np.asarray(load)
    if array.ndim != len(shape) or not array.size:
        raise UsageError(
            f"{field} has shape {array.shape}: give loads of shape [{', '.join(shape)}]"
        )
    kind = np.integer if whole else np.number
    if not np.issubdtype(array.dtype, kind) or not np.isfinite(array).all() or (array < 0).any():
        numbers = "numbers of pairs, as integers" if whole else "finite numbers of pairs"
        raise UsageError(f"{field} has type {array.dtype}: give {numbers} of at least 0")
    return array.astype(np.float64, copy=False)


def checked_pairs(field: str, load: ArrayLike, shape: str) -> Counts:
    """Return whole numbers of pairs as an array, as :func:`checked_loads`."""
    return checked_loads(field, load, shape, whole=True).astype(np.int64)


Values = TypeVar("Values", Amounts, Counts)

Split = Literal["round_robin", "lp"]
"""The ways to choose among replicas, in whole tokens.

``round_robin`` deals in turn (vLLM, by a token's position); ``lp`` minimises the fullest rank's
load of every step (LPLB), with shares made whole by the largest remainder.
"""

_STEPS: Final = 50  # of one program: many small ones in one call are twenty times as fast


def split_tokens(load_SLE: ArrayLike, placement: SlotPlan, split: Split) -> Counts:
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


def rank_loads(load_SLE: ArrayLike, placement: SlotPlan) -> Counts:
    """Return the pairs that each rank computes [S, L, R], if replicas take whole tokens in turn."""
    tokens_SLP = split_tokens(load_SLE, placement, "round_robin")
    rank_SLR: Counts = tokens_SLP.reshape(*tokens_SLP.shape[:2], placement.ranks, -1).sum(axis=3)
    return rank_SLR


def slots_in_turn(expert_P: Counts, step_P: Counts, placement: SlotPlan, layer: int) -> Counts:
    """Return the slot that computes each pair [P] of a layer, if replicas take pairs in turn.

    The i-th pair of an expert in a step goes to its (i mod n)-th slot, of n from the first rank to
    the last. A slot gets as many pairs as under ``round_robin``, which leaves open which pairs.

    ``expert_P`` is the expert of every pair, in the order of the tokens, and ``step_P`` its step.
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


def by_slot(values_SLE: Values, placement: SlotPlan) -> Values:
    """Return the value of the expert in every slot [S, L, P]."""
    if np.array_equal(
        placement.expert_LP, np.indices(values_SLE.shape[1:])[1]
    ):  # contiguous placement
        return values_SLE
    return np.take_along_axis(values_SLE, placement.expert_LP[None], axis=2)


def program_shares(load_SLE: Counts, placement: SlotPlan) -> Amounts:
    """Return the shares [S, L, P] that minimise each step's fullest rank, by programs (HiGHS).

    For each step and layer: minimise m, where the slots of an expert sum to its load and those of a
    rank to at most m. That is the program of SGLang's pull request 24515 on EPLB's replicas; that
    of https://github.com/deepseek-ai/LPLB has replicas along a fixed topology instead.
    """
    # Equal shares are right where an expert has one slot.
    tokens_SLP = by_slot(load_SLE / placement.replicas_LE, placement)
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


def _whole(tokens_SLP: Amounts, load_SLE: Counts, placement: SlotPlan) -> Counts:
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
