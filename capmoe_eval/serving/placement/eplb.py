"""EPLB: replicate the most loaded experts and pack the replicas into ranks (DeepSeek, 2025).

After the description and example in https://github.com/deepseek-ai/EPLB (commit d52c72d), which
vLLM and SGLang use as well. ``reference.py`` has the same as loops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from capmoe_eval.errors import UsageError
from capmoe_eval.serving.placement.layout import Amounts, Counts, Placement, checked_loads

# Shape suffixes: L layers, E experts, R ranks, N slots of a rank; X rows (layers, or nodes of all
# layers), I items, B bins, P slots of a node.


def plan_eplb(
    load_LE: ArrayLike, ranks: int, slots: int, groups: int = 1, nodes: int = 1
) -> Placement:
    """Return EPLB's placement for expected loads.

    Where the nodes divide the groups, it is hierarchical: groups of experts are packed into nodes,
    experts are replicated within their node, and replicas are packed into the node's ranks.
    Otherwise groups and nodes have no say. Ties go to the lower number, of experts and of ranks.

    Args:
        load_LE: Expected load of each expert, in any unit.
        ranks: Number of ranks R.
        slots: Slots N of each rank; R·N − E of them are redundant.
        groups: Groups of experts, contiguous blocks, as group-limited routing has them.
        nodes: Nodes, each of R/nodes consecutive ranks.

    Raises:
        UsageError: If the experts do not fit, or do not divide by groups, or the ranks by nodes.
    """
    load_LE = checked_loads("load_LE", load_LE, "LE")
    layers, n_experts = load_LE.shape
    for field, value in (("ranks", ranks), ("slots", slots), ("groups", groups), ("nodes", nodes)):
        if value < 1:
            raise UsageError(f"{field}={value}: must be a whole number of at least 1")
    if ranks * slots < n_experts:
        raise UsageError(
            f"slots={slots}: {ranks} ranks have room for {ranks * slots} of {n_experts} experts; "
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
    return Placement(expert_XP.reshape(layers, ranks, slots), n_experts)


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


def pack(load_XI: Amounts, bins: int) -> Counts:
    """Return the items of each bin [X, B, I/B], equally many, in the order of their packing.

    The heaviest item comes first; it goes to the lightest bin that has room. Where each bin takes
    one item, item i is bin i's, so that nothing moves without a gain.
    """
    rows, items = load_XI.shape
    room = items // bins
    if room == 1:
        return np.tile(np.arange(items)[:, None], (rows, 1, 1))
    row_X = np.arange(rows)
    packed_XBN = np.empty((rows, bins, room), dtype=np.int64)
    weight_XB, filled_XB = np.zeros((rows, bins)), np.zeros((rows, bins), dtype=np.int64)
    for item_X in np.argsort(-load_XI, axis=1, kind="stable").T:
        bin_X = np.where(filled_XB < room, weight_XB, np.inf).argmin(axis=1)
        packed_XBN[row_X, bin_X, filled_XB[row_X, bin_X]] = item_X
        weight_XB[row_X, bin_X] += load_XI[row_X, item_X]
        filled_XB[row_X, bin_X] += 1
    return packed_XBN
