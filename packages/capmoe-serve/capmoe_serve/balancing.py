"""Judge placements by the loads of ranks, on other steps than they are planned on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import CONTIGUOUS
from numpy.typing import ArrayLike

from capmoe_serve.placements import (
    Amounts,
    Counts,
    SlotPlan,
    checked_pairs,
    contiguous,
    plan_eplb,
    rank_loads,
)

# Shape suffixes: S steps, L layers, E experts, R ranks.

_STEPS = 100  # that are judged at once, which bounds the memory


class BalanceSummary(NamedTuple):
    """An outcome over all steps and layers."""

    straggler: float  # mean of the straggler factors
    worst: float  # the highest of them
    extra: float  # copies of experts in memory beyond one of each, in a layer
    drop_rate: float  # share of the asked pairs that no rank computes


@dataclass(frozen=True, eq=False)
class BalanceOutcome:
    """The outcome of one method for every step and layer.

    Pairs that no expert computed are a capacity's; a placement drops none.
    """

    method: str
    placement: SlotPlan
    asked_SL: Counts  # pairs before any drop
    load_SLR: Counts  # pairs that each rank computes

    @property
    def straggler_SL(self) -> Amounts:
        """Fullest rank over the mean rank load before any drop; NaN without a pair.

        The same measure as ``peak.device_after`` of a record's layers, where the ranks are as many.
        """
        asked_SL = np.where(self.asked_SL, self.asked_SL, np.nan)
        factor_SL: Amounts = self.load_SLR.max(axis=2) * self.load_SLR.shape[2] / asked_SL
        return factor_SL

    def summary(self) -> BalanceSummary:
        """Return means over steps and layers; those of straggler factors leave empty ones away."""
        straggler_SL = self.straggler_SL
        return BalanceSummary(
            straggler=float(np.nanmean(straggler_SL)),
            worst=float(np.nanmax(straggler_SL)),
            extra=float(self.placement.redundant),
            drop_rate=max(0.0, 1 - float(self.load_SLR.sum()) / max(int(self.asked_SL.sum()), 1)),
        )


def judge(
    method: str,
    load_SLE: ArrayLike,
    placement: SlotPlan,
    asked_SLE: ArrayLike | None = None,
) -> BalanceOutcome:
    """Return the outcome of a placement on loads, which must not be those it was planned on.

    Args:
        method: Its name.
        load_SLE: Pairs of each expert in every step and layer, whole numbers.
        placement: Its layers and experts are those of the loads.
        asked_SLE: The loads before any drop, where a capacity came first; else ``load_SLE``.

    Raises:
        UsageError: If the shapes disagree, or more is computed than was asked.
    """
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    asked_SLE = checked_pairs("asked_SLE", load_SLE if asked_SLE is None else asked_SLE, "SLE")
    parts = range(0, len(load_SLE), _STEPS)
    load_SLR = np.concatenate(
        [rank_loads(load_SLE[first : first + _STEPS], placement) for first in parts]
    )
    asked_SL = asked_SLE.sum(axis=2)
    if (load_SLR.sum(axis=2) > asked_SL).any():
        raise UsageError("asked_SLE: fewer pairs than are computed; give the loads before any drop")
    return BalanceOutcome(method, placement, asked_SL, load_SLR)


def halves(load_SLE: ArrayLike) -> tuple[Counts, Counts]:
    """Return the loads of the first half of the steps, to plan on, and of the rest, to judge on.

    Raises:
        UsageError: If there are fewer than two steps.
    """
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    if len(load_SLE) < 2:
        raise UsageError(
            "load_SLE has one step: a placement is planned on other steps than it is judged on; "
            "give at least 2"
        )
    middle = len(load_SLE) // 2
    return load_SLE[:middle], load_SLE[middle:]


def compare(
    load_SLE: ArrayLike,
    ranks: int,
    extra_slots: Iterable[int] = (1,),
    groups: int = 1,
    nodes: int = 1,
) -> list[BalanceOutcome]:
    """Return the outcomes of all placements on the second half of the steps.

    They are the contiguous placement, EPLB with the fewest slots that hold all experts, and EPLB
    with so many more on every rank. EPLB plans on the summed loads of the first half; ``groups``
    and ``nodes`` are those of :func:`plan_eplb`. Where R does not divide E, all have copies.

    Raises:
        UsageError: For loads that are no whole numbers of pairs.
    """
    planned_SLE, judged_SLE = halves(load_SLE)
    layers, n_experts = judged_SLE.shape[1:]
    home = contiguous(layers, n_experts, ranks)
    outcomes = [judge(CONTIGUOUS, judged_SLE, home)]
    for extra in (0, *extra_slots):
        slots = home.expert_LRN.shape[2] + extra
        placement = plan_eplb(planned_SLE.sum(axis=0), ranks, slots, groups, nodes)
        copies = f"+{placement.redundant}" if placement.redundant else ""
        outcomes.append(judge(f"EPLB{copies}", judged_SLE, placement))
    return outcomes
