"""Plan the experts of ranks: EPLB for expected loads, LLEP for the loads of each step.

EPLB replicates the most loaded experts and packs the replicas into ranks, after the description and
example in https://github.com/deepseek-ai/EPLB (commit d52c72d), which vLLM and SGLang use as well.

LLEP sends the overflow of a rank, with the weights of its experts, to the least loaded rank
(Least-Loaded Expert Parallelism, arXiv 2601.17111, Algorithms 2 to 4). Where the paper is open:

- Algorithm 4 compares the loads of experts with λ, the released code those of ranks
  (``imbalance``).
- m_α is rounded up to whole tokens, as a capacity is; the released code rounds down, so that at
  α = 1 some tokens fit nowhere.
- An excess too small for a transfer goes whole to the least loaded rank (Algorithm 3 and the
  released code); the paper's text keeps it at home.
- Ties go to the lower expert and the lower rank.

The tests define both with loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import check_fields
from capmoe_methods.eplb_placement.packing import pack
from numpy.typing import ArrayLike
from pydantic import PositiveFloat, PositiveInt

from capmoe_serve.slots import (
    Amounts,
    Counts,
    SlotPlan,
    checked_loads,
    checked_pairs,
    contiguous,
)

# Shape suffixes: L layers, E experts, R ranks, N slots of a rank; X rows (layers, nodes or steps of
# layers), B bins, P slots of a node, O rows with tokens left.


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


@dataclass(frozen=True)
class LeastLoaded:
    """The settings of LLEP; the defaults are those of the paper's measurements (§5.1)."""

    alpha: PositiveFloat = 1.0  # a rank takes at most α times the mean load before others help
    least: PositiveInt = 1024  # tokens m that are worth a transfer of weights
    threshold: PositiveFloat = 1.3  # below this imbalance λ nothing is moved
    # Whose highest load over their mean is compared with λ: the experts' (Algorithm 4) or the
    # ranks' (released code).
    imbalance: Literal["expert", "rank"] = "expert"

    def __post_init__(self) -> None:
        check_fields(self)

    def limit(self, total_X: Counts, ranks: int) -> Counts:
        """Return m_α = ceil(α·pairs/R), exact for the decimal α that was written."""
        alpha = Fraction(repr(float(self.alpha)))
        return -(-alpha.numerator * total_X // (alpha.denominator * ranks))


def least_loaded(load_XE: ArrayLike, ranks: int, settings: LeastLoaded) -> Counts:
    """Return the pairs of each expert that each rank computes [X, R, E].

    Experts are at home as in :func:`contiguous`. They are placed from the most loaded to the least.
    An expert's home takes what fits under m_α beside the home's other experts. The rest goes to the
    ranks that are least loaded with all that is theirs.

    ``load_XE`` are pairs of each expert, a row for each layer of each step.

    Raises:
        UsageError: For other loads, or if R does not divide E.
    """
    load_XE = checked_pairs("load_XE", load_XE, "XE")
    rows, n_experts = load_XE.shape
    local = contiguous(1, n_experts, ranks).expert_LRN.shape[2]
    total_X, row_X = load_XE.sum(axis=1), np.arange(rows)
    busy_XR = load_XE.reshape(rows, ranks, local).sum(axis=2)  # assigned, or still to come at home
    by_expert = settings.imbalance == "expert"
    units, fullest_X = (n_experts, load_XE.max(1)) if by_expert else (ranks, busy_XR.max(1))
    stays_X = (fullest_X * units < settings.threshold * total_X) | (ranks == 1)
    limit_X = np.where(stays_X, total_X, settings.limit(total_X, ranks))
    tokens_XRE = np.zeros((rows, ranks, n_experts), dtype=np.int64)
    for expert_X in np.argsort(-load_XE, axis=1, kind="stable").T:
        home_X, rest_X = expert_X // local, load_XE[row_X, expert_X]
        busy_XR[row_X, home_X] -= rest_X
        own_X = (limit_X - busy_XR[row_X, home_X]).clip(0, rest_X)
        busy_XR[row_X, home_X] += own_X
        tokens_XRE[row_X, home_X, expert_X] = own_X
        rest_X = rest_X - own_X
        while len(row_O := rest_X.nonzero()[0]):
            busy_OR, rest_O = busy_XR[row_O], rest_X[row_O]
            busy_OR[np.arange(len(row_O)), home_X[row_O]] = np.iinfo(np.int64).max
            helper_O = busy_OR.argmin(axis=1)
            # The least loaded rank has the most space: where it has too little, all have.
            room_O = limit_X[row_O] - busy_XR[row_O, helper_O]
            fits_O = (room_O >= rest_O) | (room_O < settings.least)
            part_O = np.where(fits_O, rest_O, room_O)
            busy_XR[row_O, helper_O] += part_O
            tokens_XRE[row_O, helper_O, expert_X[row_O]] += part_O
            rest_X[row_O] -= part_O
    return tokens_XRE
