"""Compute the settings of a deployment on a trace: capacities, placements, activated experts.

All settings are judged on the same steps, the second half of the trace; what is planned, is planned
on the first half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.status_lines import Say, silent
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.registry import CONTIGUOUS
from capmoe_eval.serving.capacities import CapacityCounter, Factors, layer_factors
from capmoe_eval.serving.pairs import KEEPERS, activated_by_oea
from capmoe_eval.serving.placement.comparison import compare, halves
from capmoe_eval.serving.placement.eplb import plan_eplb
from capmoe_eval.serving.placement.layout import Counts, Placement, contiguous
from capmoe_eval.serving.placement.outcome import Outcome, judge, judge_least_loaded
from capmoe_eval.serving.settings import Granularity, Setting, speedup
from capmoe_eval.serving.trace import Trace

_BEST = ("score",)
"""Who is kept on a placement and with a γ for each layer; it changes no load."""


def check_deployment(n_experts: int, ranks: int, slots: int) -> None:
    """Refuse ranks that the experts cannot be spread over, and too few experts on a rank."""
    if ranks < 2:
        raise UsageError("ranks=1: one rank waits for no other; give at least 2")
    local = experts_per_rank(n_experts, ranks, "ranks")
    if slots > n_experts:
        raise UsageError(
            f"experts_per_rank={slots}: there are {n_experts}, and a rank needs one of each at "
            f"most; give {local} to {n_experts}"
        )
    if slots < local:
        raise UsageError(
            f"experts_per_rank={slots}: {ranks} ranks have room for {ranks * slots} of {n_experts} "
            f"experts; give at least {local}"
        )


def trace_settings(
    trace: Trace,
    gammas: Sequence[float],
    ranks: int,
    slots: int,
    link_share: float = 0.0,
    say: Say = silent,
) -> list[Setting]:
    """Return all settings on a trace.

    They are in the order: unchanged; balanced without loss; capacities on the placement in blocks,
    with one γ for each keeper and with a γ for each layer; those on EPLB's placements; OEA.

    ``slots`` are the experts on a rank, with copies; ``link_share`` is as for
    :func:`capmoe_eval.serving.settings.speedup`; ``say`` takes lines on the progress.

    Raises:
        UsageError: If the experts cannot be spread so, or the judged steps are empty.
    """
    load_SLE = trace.loads()
    if not load_SLE[len(load_SLE) // 2 :].any():
        raise UsageError("load_SLE: the second half of the steps has no pair; record more traffic")
    home = contiguous(trace.n_layers, trace.n_experts, ranks)
    extra = slots - home.expert_LRN.shape[2]
    if len(load_SLE) < 2:  # nothing is left to judge a plan on
        planned_SLE, outcomes = None, [judge(CONTIGUOUS, load_SLE, home)]
        outcomes.append(judge_least_loaded(load_SLE, ranks))
    else:
        planned_SLE = halves(load_SLE)[0]
        outcomes = compare(load_SLE, ranks, (extra,) if extra else (), say=say)
    judged = _Judged(
        trace.second_half(),
        gammas,
        home,
        _straggler(outcomes[0]),
        outcomes[0].summary().active,
        link_share,
        say,
    )
    settings = [judged.balanced(outcome) for outcome in outcomes]
    settings += judged.capacities(home, planned_SLE)
    if planned_SLE is not None:
        expected_LE = planned_SLE.sum(axis=0)
        for more in sorted({0, extra}):
            placement = plan_eplb(expected_LE, ranks, slots - extra + more)
            if not np.array_equal(placement.expert_LRN, home.expert_LRN):
                settings += judged.capacities(placement)
    return settings + [
        Setting(
            kind="activation",
            method="oea",
            knobs=f"k0={found.k0}",
            drop_rate=found.drop_rate,
            active=found.active,
            active_before=judged.active,
        )
        for found in activated_by_oea(judged.trace, say)
    ]


def _straggler(outcome: Outcome) -> float:
    fullest = float(outcome.load_SLR.max(axis=2).sum())
    return fullest * int(outcome.load_SLR.shape[2]) / max(int(outcome.asked_SL.sum()), 1)


@dataclass(frozen=True)
class _Judged:
    """The judged steps, and the unchanged model on them, with which settings are compared."""

    trace: Trace
    gammas: Sequence[float]
    home: Placement
    straggler: float  # of the unchanged model
    active: float  # copies of experts that compute there
    link_share: float
    say: Say

    def _setting(
        self, straggler: float, sent: float, active: float | None, **fields: object
    ) -> Setting:
        """Return a setting by its straggler factor, the share of sent pairs, and active copies."""
        compared = {
            "straggler": straggler,
            "speedup": speedup(straggler, self.straggler, sent, self.link_share),
            "active": active,
            "active_before": self.active,
        }
        return Setting.model_validate(compared | fields)

    def _say_of(self, what: str) -> Say:
        return lambda line: self.say(what + line)

    def balanced(self, outcome: Outcome) -> Setting:
        """Return the setting of a method that drops nothing."""
        summary = outcome.summary()
        kinds = {CONTIGUOUS: "unchanged", "LLEP": "transfers"}
        return self._setting(
            _straggler(outcome),
            1.0,
            summary.active,
            kind=kinds.get(outcome.method, "placement"),
            method=outcome.method,
            extra=summary.extra,
            moved=summary.moved,
            set_up=float(outcome.set_up_L.mean()),
        )

    def capacities(
        self, placement: Placement, planned_SLE: Counts | None = None
    ) -> Iterator[Setting]:
        """Yield the capacities on the placement in blocks, or on one of EPLB.

        They have one γ for all layers, and where there are loads to plan it on, one for each.
        """
        layers, copies = placement.layers, placement.redundant
        about: dict[str, object] = {}
        if placement is not self.home:
            about = {
                "placement": f"EPLB+{copies}" if copies else "EPLB",
                "extra": float(copies),
                "set_up": float(placement.moved_from(self.home).mean()),
            }
        for granularity in _granularities(placement):
            chosen: list[tuple[dict[str, object], Factors]] = [
                ({"gamma": float(gamma)}, [gamma] * layers) for gamma in self.gammas
            ]
            if planned_SLE is not None:
                planned = layer_factors(
                    planned_SLE, self.trace.top_k, self.gammas, placement, granularity
                )
                chosen += [
                    ({"matched": float(gamma), "layer_gammas": tuple(factors)}, factors)
                    for gamma, factors in zip(self.gammas, planned, strict=True)
                    if factors is not None and len(set(factors)) > 1
                ]
            keepers = _BEST if about else KEEPERS
            factor_XL = [factors for _, factors in chosen]
            counter = CapacityCounter(self.trace, factor_XL, placement, granularity, keepers)
            what = f"capacities of each {granularity} on {about.get('placement', 'blocks')}: "
            for (named, _), found in zip(chosen, counter.counted(self._say_of(what)), strict=True):
                for keeper in _BEST if "layer_gammas" in named else keepers:
                    yield self._setting(
                        found.straggler,
                        1 - found.drop_rate,
                        found.mean_active(keeper),
                        kind="capacity",
                        method=keeper,
                        granularity=granularity,
                        drop_rate=found.drop_rate,
                        pad_waste=found.pad_waste,
                        dropped_score=found.lost.get(keeper),
                        **named,
                        **about,
                    )


def _granularities(placement: Placement) -> tuple[Granularity, ...]:
    """Return what can have a capacity: experts without copies, and devices of several slots."""
    experts: tuple[Granularity, ...] = () if placement.redundant else ("expert",)
    return (*experts, "device") if placement.expert_LRN.shape[2] > 1 else experts
