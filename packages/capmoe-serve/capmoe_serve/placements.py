"""Place experts into the slots of ranks, split their pairs over the slots, and judge placements.

EPLB replicates the most loaded experts and packs the replicas into ranks, after the description and
example in https://github.com/deepseek-ai/EPLB (commit d52c72d), which vLLM and SGLang use as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import CONTIGUOUS
from capmoe_methods.eplb_placement.packing import pack
from numpy.typing import ArrayLike, NDArray

from capmoe_serve.trace import Trace

# Shape suffixes: S steps, L layers, E experts, R ranks, N slots of a rank, P = R·N slots; X rows
# (layers or nodes of them), B bins. Of pairs of a token and an expert: I.

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The expert in every slot: R ranks have N slots each, in every layer.

    ``expert_LRN.reshape(L, -1)`` is the ``physical_to_logical_map`` of EPLB, vLLM and SGLang.
    Every expert has a slot in each layer.
    """

    expert_LRN: Counts
    n_experts: int

    @property
    def ranks(self) -> int:
        """Number of ranks R."""
        return int(self.expert_LRN.shape[1])

    @property
    def slots(self) -> int:
        """Slots N of a rank."""
        return int(self.expert_LRN.shape[2])

    @property
    def redundant(self) -> int:
        """Slots of a layer beyond one for each expert: R·N − E."""
        return self.ranks * self.slots - self.n_experts

    @property
    def expert_LP(self) -> Counts:
        """The expert in every slot, rank after rank."""
        return self.expert_LRN.reshape(len(self.expert_LRN), -1)

    def split(self, load_SE: Counts, layer: int) -> Counts:
        """Return the pairs that each slot of a layer computes [S, P].

        Replicas of an expert take its pairs in turn, from the first rank to the last.
        """
        expert_P = self.expert_LP[layer]
        replicas_E = np.bincount(expert_P, minlength=self.n_experts)
        each_SE, more_SE = np.divmod(load_SE, replicas_E)
        is_first_SP = turns(expert_P) < more_SE[:, expert_P]  # which take one more
        return np.asarray(each_SE[:, expert_P] + is_first_SP)

    def rank_load(self, load_SE: Counts, layer: int) -> Counts:
        """Return the pairs that each rank computes of a layer [S, R]."""
        slot_SP = self.split(load_SE, layer)
        return np.asarray(slot_SP.reshape(len(slot_SP), self.ranks, -1).sum(axis=2))

    def slot_of(self, expert_I: Counts, step_I: Counts, layer: int) -> Counts:
        """Return the slot that computes each pair of a layer, as :meth:`split` counts them.

        ``expert_I`` is the expert of every pair, in the order of the tokens, and ``step_I`` its
        step.
        """
        expert_P = self.expert_LP[layer]
        by_expert_P = np.argsort(expert_P, kind="stable")
        replicas_E = np.bincount(expert_P, minlength=self.n_experts)
        first_E = replicas_E.cumsum() - replicas_E
        turn_I = turns(step_I * self.n_experts + expert_I) % replicas_E[expert_I]
        return np.asarray(by_expert_P[first_E[expert_I] + turn_I])


def turns(group_I: Counts) -> Counts:
    """Return the number of each item among those of its group, from 0."""
    size_G = np.bincount(group_I)
    short_I = group_I.astype(np.min_scalar_type(len(size_G)))  # short integers sort faster
    order_I = np.argsort(short_I, kind="stable")
    turn_I = np.empty_like(order_I)
    turn_I[order_I] = np.arange(len(group_I)) - np.repeat(size_G.cumsum() - size_G, size_G)
    return turn_I


def contiguous(layers: int, n_experts: int, ranks: int, slots: int | None = None) -> SlotPlan:
    """Return the placement that servers begin with: the experts in order, rank after rank.

    Each rank has ``slots``, by default as few as hold all experts. Where R divides E this is the
    paper's placement: rank r holds the experts r·E/R to (r+1)·E/R − 1. In slots that are left the
    first experts stand again behind the last one, as in vLLM
    (``build_initial_global_physical_to_logical_map`` of ``vllm/distributed/eplb/eplb_state.py``).
    """
    slots = -(-n_experts // ranks) if slots is None else slots
    expert_RN = (np.arange(ranks * slots, dtype=np.int64) % n_experts).reshape(ranks, slots)
    return SlotPlan(np.tile(expert_RN, (layers, 1, 1)), n_experts)


def plan_eplb(load_LE: Counts, ranks: int, slots: int, groups: int = 1, nodes: int = 1) -> SlotPlan:
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
        UsageError: If the experts do not divide by groups, or the ranks by nodes.
    """
    layers, n_experts = load_LE.shape
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
    copy_XP, count_XE = _replicate(load_XE, ranks * slots // nodes)
    share_XP = np.take_along_axis(load_XE / count_XE, copy_XP, axis=1)
    placed_XBN = pack(share_XP, ranks // nodes)
    held_XP = np.take_along_axis(copy_XP, placed_XBN.reshape(layers * nodes, -1), axis=1)
    expert_XP = np.take_along_axis(expert_XE, held_XP, axis=1)
    return SlotPlan(expert_XP.reshape(layers, ranks, slots), n_experts)


def _replicate(load_XE: Counts, slots: int) -> tuple[Counts, Counts]:
    """Return the expert of every replica [X, P], and the number of replicas of each expert [X, E].

    One more replica goes, until the slots are full, to the expert with the highest load per
    replica. No other choice of numbers has a lower highest load per replica.
    """
    rows, n_experts = load_XE.shape
    row_X = np.arange(rows)
    copy_XP = np.tile(np.arange(slots), (rows, 1))
    count_XE = np.ones((rows, n_experts), dtype=np.int64)
    for slot in range(n_experts, slots):
        expert_X = (load_XE / count_XE).argmax(axis=1)
        copy_XP[:, slot] = expert_X
        count_XE[row_X, expert_X] += 1
    return copy_XP, count_XE


# Several placements of the same loads.


def compare(
    load_SLE: ArrayLike,
    ranks: int,
    extra_slots: Iterable[int] = (1,),
    groups: int = 1,
    nodes: int = 1,
) -> pd.DataFrame:
    """Return what every placement of :func:`placements` gives, as :func:`judge`, by its name.

    EPLB plans on the first half of the steps; all are judged on the second.

    Raises:
        UsageError: For loads that are no whole numbers of pairs, or fewer than two steps.
    """
    load_SLE = Trace(np.shape(load_SLE)[-1], load_SLE=np.asarray(load_SLE)).loads()
    if (middle := len(load_SLE) // 2) < 1:
        raise UsageError(
            "load_SLE has one step: a placement is planned on other steps than it is judged on; "
            "give at least 2"
        )
    planned = placements(load_SLE[:middle].sum(axis=0), ranks, extra_slots, groups, nodes)
    rows = {name: judge(load_SLE[middle:], placement) for name, placement in planned.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("placement")


def placements(
    load_LE: Counts, ranks: int, extra_slots: Iterable[int] = (1,), groups: int = 1, nodes: int = 1
) -> dict[str, SlotPlan]:
    """Return contiguous placement and those of EPLB for summed loads, by their names.

    EPLB has the fewest slots that hold all experts, and so many more on every rank; ``groups`` and
    ``nodes`` are those of :func:`plan_eplb`. Where R does not divide E, all have copies.
    """
    layers, n_experts = load_LE.shape
    plans = {CONTIGUOUS: contiguous(layers, n_experts, ranks)}
    for extra in (0, *extra_slots):
        placement = plan_eplb(load_LE, ranks, plans[CONTIGUOUS].slots + extra, groups, nodes)
        plans[eplb_name(placement.redundant)] = placement
    return plans


def eplb_name(copies: int) -> str:
    """Return the name of EPLB's placement with so many copies of experts in a layer."""
    return f"EPLB+{copies}" if copies else "EPLB"


def judge(
    load_SLE: Counts, placement: SlotPlan, asked_SLE: Counts | None = None
) -> dict[str, float]:
    """Return what a placement gives on loads, which must not be those it was planned on.

    - ``straggler``: load of the fullest rank over the mean rank load before any drop, the mean over
      the steps and layers that have a pair: as ``peak.device_after`` of a record's layers
    - ``worst``: the highest of them
    - ``extra``: copies of experts in a layer
    - ``drop_rate``: share of the pairs that no rank computes; ``asked_SLE`` are the loads before a
      capacity came first
    """
    asked_SL = (load_SLE if asked_SLE is None else asked_SLE).sum(axis=2)
    fullest_SL = np.stack(
        [
            placement.rank_load(load_SLE[:, layer], layer).max(axis=1)
            for layer in range(load_SLE.shape[1])
        ],
        axis=1,
    )
    straggler_SL = fullest_SL * placement.ranks / np.where(asked_SL, asked_SL, np.nan)
    return {
        "straggler": float(np.nanmean(straggler_SL)),
        "worst": float(np.nanmax(straggler_SL)),
        "extra": float(placement.redundant),
        "drop_rate": 1 - float(load_SLE.sum()) / max(int(asked_SL.sum()), 1),
    }
