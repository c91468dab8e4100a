"""Judge balancing on loads: the fullest rank, active experts, memory, and weights that move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import CONTIGUOUS
from numpy.typing import ArrayLike

from capmoe_serve.planners import LeastLoaded, least_loaded, plan_eplb
from capmoe_serve.slots import (
    Amounts,
    Counts,
    SlotPlan,
    Split,
    checked_pairs,
    contiguous,
    split_tokens,
)
from capmoe_serve.status_lines import Say, silent

# Shape suffixes: S steps, L layers, E experts, R ranks, X layers of some steps.

_STEPS = 100  # that are judged at once, which bounds the memory


class BalanceSummary(NamedTuple):
    """An outcome over all steps and layers."""

    straggler: float  # mean of the straggler factors
    worst: float  # the highest of them
    active: float  # copies of experts that compute in a layer of a step, over all ranks, mean
    active_fullest: float  # the same of the rank with most of them
    extra: float  # copies of experts in memory beyond one of each, mean over layers of steps
    moved: float  # weights of experts that are sent in a layer of a step, mean
    redirected: float  # share of the pairs that follow such weights
    drop_rate: float  # share of the asked pairs that no rank computes


@dataclass(frozen=True, eq=False)
class BalanceOutcome:
    """The outcome of one method for every step and layer.

    Pairs that no expert computed are a capacity's; a balancing method has none.
    """

    method: str
    asked_SL: Counts  # pairs before any drop
    load_SLR: Counts  # pairs that each rank computes
    active_SLR: Counts  # copies of experts that compute on each rank
    extra_SL: Counts  # copies of experts in memory beyond one of each
    moved_SL: Counts  # weights of experts that are sent in this step
    redirected_SL: Counts  # pairs that follow them
    set_up_L: Counts  # weights that are sent once, to come from the placement before

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
        asked = max(int(self.asked_SL.sum()), 1)
        return BalanceSummary(
            straggler=float(np.nanmean(straggler_SL)),
            worst=float(np.nanmax(straggler_SL)),
            active=float(self.active_SLR.sum(axis=2).mean()),
            active_fullest=float(self.active_SLR.max(axis=2).mean()),
            extra=float(self.extra_SL.mean()),
            moved=float(self.moved_SL.mean()),
            redirected=int(self.redirected_SL.sum()) / asked,
            drop_rate=max(0.0, 1 - float(self.load_SLR.sum()) / asked),
        )


def judge(
    method: str,
    load_SLE: ArrayLike,
    placement: SlotPlan,
    split: Split = "round_robin",
    asked_SLE: ArrayLike | None = None,
    before: SlotPlan | None = None,
    say: Say = silent,
) -> BalanceOutcome:
    """Return the outcome of a placement on loads, which must not be those it was planned on.

    Args:
        method: Its name.
        load_SLE: Pairs of each expert in every step and layer, whole numbers.
        placement: Its layers and experts are those of the loads.
        split: How tokens choose among replicas.
        asked_SLE: The loads before any drop, where a capacity came first; else ``load_SLE``.
        before: The placement that weights are moved from; None if they are loaded in place.
        say: Takes lines on the progress.

    Raises:
        UsageError: If the shapes disagree, or more is computed than was asked.
    """
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    asked_SLE = checked_pairs("asked_SLE", load_SLE if asked_SLE is None else asked_SLE, "SLE")
    parts = []
    for first in range(0, len(load_SLE), _STEPS):
        say(f"{method}: {first:,} of {len(load_SLE):,} steps")
        tokens_SLP = split_tokens(load_SLE[first : first + _STEPS], placement, split)
        tokens_SLRN = tokens_SLP.reshape(*tokens_SLP.shape[:2], placement.ranks, -1)
        parts.append((tokens_SLRN.sum(axis=3), (tokens_SLRN > 0).sum(axis=3)))
    load_SLR, active_SLR = (np.concatenate(part) for part in zip(*parts, strict=True))
    asked_SL = asked_SLE.sum(axis=2)
    nothing_SL = np.zeros_like(asked_SL)
    if (load_SLR.sum(axis=2) > asked_SL).any():
        raise UsageError("asked_SLE: fewer pairs than are computed; give the loads before any drop")
    return BalanceOutcome(
        method=method,
        asked_SL=asked_SL,
        load_SLR=load_SLR,
        active_SLR=active_SLR,
        extra_SL=nothing_SL + placement.redundant,
        moved_SL=nothing_SL,
        redirected_SL=nothing_SL,
        set_up_L=placement.moved_from(before or placement),
    )


def judge_least_loaded(
    load_SLE: ArrayLike, ranks: int, settings: LeastLoaded | None = None, say: Say = silent
) -> BalanceOutcome:
    """Return the outcome of LLEP, which plans every step by that step's own loads.

    Raises:
        UsageError: For other loads, or if ``ranks`` does not divide E.
    """
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    steps, layers, n_experts = load_SLE.shape
    home_RE = contiguous(1, n_experts, ranks).held_LRE[0]
    parts = []
    for first in range(0, steps, _STEPS):
        say(f"LLEP: {first:,} of {steps:,} steps")
        load_XE = load_SLE[first : first + _STEPS].reshape(-1, n_experts)
        tokens_XRE = least_loaded(load_XE, ranks, settings or LeastLoaded())
        away_XRE = np.where(home_RE, 0, tokens_XRE)
        parts.append(
            (
                tokens_XRE.sum(axis=2),
                (tokens_XRE > 0).sum(axis=2),
                (away_XRE > 0).sum(axis=(1, 2)),
                away_XRE.sum(axis=(1, 2)),
            )
        )
    load_XR, active_XR, moved_X, redirected_X = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    moved_SL = moved_X.reshape(steps, layers)
    return BalanceOutcome(
        method="LLEP",
        asked_SL=load_SLE.sum(axis=2),
        load_SLR=load_XR.reshape(steps, layers, ranks),
        active_SLR=active_XR.reshape(steps, layers, ranks),
        extra_SL=moved_SL,  # a copy stays for its step
        moved_SL=moved_SL,
        redirected_SL=redirected_X.reshape(steps, layers),
        set_up_L=np.zeros(layers, dtype=np.int64),
    )


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
    settings: LeastLoaded | None = None,
    groups: int = 1,
    nodes: int = 1,
    say: Say = silent,
) -> list[BalanceOutcome]:
    """Return the outcomes of all methods on the second half of the steps.

    They are the contiguous placement, EPLB without redundant experts, EPLB and LPLB on the same
    placement with so many redundant slots on every rank, and LLEP. EPLB plans on the summed loads
    of the first half; LPLB's split and LLEP know the loads of the step that they balance. ``say``
    takes lines on the progress; ``groups`` and ``nodes`` are those of :func:`plan_eplb`.

    If R does not divide E, every rank has E/R slots, rounded up, so that all placements have
    copies; LLEP, which needs experts at home on one rank, is left out.

    Raises:
        UsageError: For loads that are no whole numbers of pairs.
    """
    planned_SLE, judged_SLE = halves(load_SLE)
    layers, n_experts = judged_SLE.shape[1:]
    expected_LE = planned_SLE.sum(axis=0)
    local = -(-n_experts // ranks)
    home = contiguous(layers, n_experts, ranks, local)
    outcomes = [judge(CONTIGUOUS, judged_SLE, home)]
    for slots in (local, *(local + extra for extra in extra_slots)):
        placement = plan_eplb(expected_LE, ranks, slots, groups, nodes)
        copies = f"+{placement.redundant}" if placement.redundant else ""
        outcomes.append(judge(f"EPLB{copies}", judged_SLE, placement, before=home))
        if copies:
            lplb = judge(f"LPLB{copies}", judged_SLE, placement, "lp", before=home, say=say)
            outcomes.append(lplb)
    if n_experts % ranks == 0:
        outcomes.append(judge_least_loaded(judged_SLE, ranks, settings, say))
    return outcomes
