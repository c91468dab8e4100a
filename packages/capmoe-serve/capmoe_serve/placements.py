"""Place experts into the slots of ranks, and split their pairs over the slots.

EPLB replicates the most loaded experts and packs the replicas into ranks, after the description and
example in https://github.com/deepseek-ai/EPLB (commit d52c72d), which vLLM and SGLang use as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_methods.eplb_placement.packing import pack
from numpy.typing import ArrayLike, NDArray

# Shape suffixes: S steps, L layers, E experts, R ranks, N slots of a rank, P = R·N slots; X rows
# (layers or nodes of them), B bins.

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

    Each rank has ``slots``, by default as few as hold all experts. Where R divides E this is the
    paper's placement: rank r holds the experts r·E/R to (r+1)·E/R − 1. In slots that are left the
    first experts stand again behind the last one, as in vLLM
    (``build_initial_global_physical_to_logical_map`` of ``vllm/distributed/eplb/eplb_state.py``).

    Raises:
        UsageError: If the slots have no space for E.
    """
    slots = -(-n_experts // ranks) if slots is None else slots
    expert_RN = (np.arange(ranks * slots, dtype=np.int64) % n_experts).reshape(ranks, slots)
    return SlotPlan(np.tile(expert_RN, (layers, 1, 1)), n_experts)


def plan_eplb(
    load_LE: ArrayLike, ranks: int, slots: int, groups: int = 1, nodes: int = 1
) -> SlotPlan:
    """Return EPLB's placement for expected loads.

    Where the nodes divide the groups, it is hierarchical: groups of experts are packed into nodes,
    experts are replicated within their node, and replicas are packed into the node's ranks.
    Otherwise groups and nodes have no say. Ties go to the lower number, of experts and of ranks.

    Args:
        load_LE: Expected load of each expert, in any unit.
        ranks: Number of ranks R.
        slots: Slots N of each rank; R·N − E of them are redundant.
        groups: Groups of neighbouring experts, as group-limited routing has them.
        nodes: Nodes, each of R/nodes consecutive ranks.

    Raises:
        UsageError: If the experts do not fit, or do not divide by groups, or the ranks by nodes.
    """
    load_LE = checked_loads("load_LE", load_LE, "LE")
    layers, n_experts = load_LE.shape
    if ranks * slots < n_experts:
        raise UsageError(
            f"slots={slots}: {ranks} ranks have space for {ranks * slots} of {n_experts} experts; "
            f"give at least {-(-n_experts // ranks)}"
        )
    if n_experts % groups:
        raise UsageError(f"groups={groups}: must divide the number of experts, {n_experts}")
    if ranks % nodes:
        raise UsageError(f"nodes={nodes}: must divide the number of ranks, {ranks}")
    if groups % nodes:
        groups = nodes = 1
    size = n_experts // groups
    group_LBN = pack(load_LE.reshape(layers, groups, size).sum(axis=2), nodes)
    expert_XE = (group_LBN[..., None] * size + np.arange(size)).reshape(layers * nodes, -1)
    load_XE = np.take_along_axis(load_LE, expert_XE.reshape(layers, -1), axis=1)
    load_XE = load_XE.reshape(layers * nodes, -1)
    copy_XP, count_XE = replicate(load_XE, ranks * slots // nodes)
    share_XP = np.take_along_axis(load_XE / count_XE, copy_XP, axis=1)
    placed_XBN = pack(share_XP, ranks // nodes)
    held_XP = np.take_along_axis(copy_XP, placed_XBN.reshape(layers * nodes, -1), axis=1)
    expert_XP = np.take_along_axis(expert_XE, held_XP, axis=1)
    return SlotPlan(expert_XP.reshape(layers, ranks, slots), n_experts)


def replicate(load_XE: Amounts, slots: int) -> tuple[Counts, Counts]:
    """Return the expert of every replica [X, P], and the number of replicas of each expert [X, E].

    One more replica goes, until the slots are full, to the expert with the highest load per
    replica. No other choice of numbers has a lower highest load per replica.
    """
    rows, n_experts = load_XE.shape
    row_X = np.arange(rows)
    copy_XP = np.tile(np.arange(n_experts), (rows, 1))
    count_XE = np.ones((rows, n_experts), dtype=np.int64)
    more_XP = np.empty((rows, slots - n_experts), dtype=np.int64)
    for slot in range(slots - n_experts):
        expert_X = (load_XE / count_XE).argmax(axis=1)
        more_XP[:, slot] = expert_X
        count_XE[row_X, expert_X] += 1
    return np.concatenate([copy_XP, more_XP], axis=1), count_XE


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


def split_tokens(load_SLE: ArrayLike, placement: SlotPlan) -> Counts:
    """Return the pairs that each slot computes [S, L, P]; replicas take whole tokens in turn.

    Raises:
        UsageError: For loads of another shape than the placement.
    """
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    if load_SLE.shape[1:] != (placement.layers, placement.n_experts):
        raise UsageError(
            f"load_SLE has shape {load_SLE.shape}: the placement has {placement.layers} layers of "
            f"{placement.n_experts} experts; give loads of the same"
        )
    if not placement.redundant:
        return by_slot(load_SLE, placement)
    each_SLE: Counts = load_SLE // placement.replicas_LE
    more_SLE: Counts = load_SLE % placement.replicas_LE
    is_first_SLP = placement.turn_LP < by_slot(more_SLE, placement)  # which take one more
    tokens_SLP: Counts = by_slot(each_SLE, placement) + is_first_SLP
    return tokens_SLP


def rank_loads(load_SLE: ArrayLike, placement: SlotPlan) -> Counts:
    """Return the pairs that each rank computes [S, L, R], as :func:`split_tokens` deals them."""
    tokens_SLP = split_tokens(load_SLE, placement)
    rank_SLR: Counts = tokens_SLP.reshape(*tokens_SLP.shape[:2], placement.ranks, -1).sum(axis=3)
    return rank_SLR


def slots_in_turn(expert_P: Counts, step_P: Counts, placement: SlotPlan, layer: int) -> Counts:
    """Return the slot that computes each pair [P] of a layer, if replicas take pairs in turn.

    The i-th pair of an expert in a step goes to its (i mod n)-th slot, of n from the first rank to
    the last. A slot gets as many pairs as from :func:`split_tokens`, which leaves open which pairs.

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


def by_slot(values_SLE: Counts, placement: SlotPlan) -> Counts:
    """Return the value of the expert in every slot [S, L, P]."""
    if np.array_equal(
        placement.expert_LP, np.indices(values_SLE.shape[1:])[1]
    ):  # contiguous placement
        return values_SLE
    return np.take_along_axis(values_SLE, placement.expert_LP[None], axis=2)
