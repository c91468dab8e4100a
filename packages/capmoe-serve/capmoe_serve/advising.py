"""Advise on a trace, with records of its model if there are any, or on records alone.

All settings of a trace are judged on the same steps, its second half; what is planned, is planned
on the first half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.registry import CONTIGUOUS

from capmoe_serve.advice import Advice, Budget, activation, recommend, telling, unknown
from capmoe_serve.balancing import (
    BalanceOutcome,
    compare,
    halves,
    judge,
    judge_least_loaded,
)
from capmoe_serve.capacities import CapacityCounter, Factors, layer_factors
from capmoe_serve.exports import ServerFile, capacity_files, placement_files
from capmoe_serve.pairs import KEEPERS, activated_by_oea
from capmoe_serve.planners import plan_eplb
from capmoe_serve.quality import Quality
from capmoe_serve.settings import (
    Granularity,
    ServingSetting,
    axis_of,
    speedup,
    with_front,
)
from capmoe_serve.slots import Counts, SlotPlan, contiguous
from capmoe_serve.status_lines import Say, silent
from capmoe_serve.trace import Trace

_BEST = ("score",)
"""Who is kept on a placement and with a γ for each layer; it changes no load."""


class ServingDeployment(NamedTuple):
    """The way in which a model is served."""

    ranks: int
    experts_per_rank: int | None = None  # with copies; None for one copy more than without any
    link_share: float = 0.0  # of the expert step's time: see `serving.settings.speedup`
    expert_bytes: int | None = None  # of the weights of one expert


class Advised(NamedTuple):
    """An advice and the files for servers."""

    advice: Advice
    files: dict[str, str]  # texts by name


def advise_on_trace(
    trace: Trace,
    gammas: Sequence[float],
    deployment: ServingDeployment,
    budget: Budget,
    *,
    quality: Quality | None = None,
    assumed_steps: str | None = None,
    results: str = "results/mine",
    say: Say = silent,
) -> Advised:
    """Return the advice on a trace, which has steps.

    ``quality`` is the accuracy of its model by records, ``assumed_steps`` says how tokens were put
    into steps if that was assumed, ``results`` is the directory that its commands name, and ``say``
    takes lines on the progress.

    Raises:
        UsageError: For another deployment than can be, or γ=∞.
    """
    for gamma in gammas:
        if not 0 < gamma < math.inf:
            raise UsageError(
                f"gammas={gamma:g}: must be finite and above 0, for example --gammas 1 1.5 2"
            )
    ranks, slots, link_share, _ = deployment
    slots = trace.n_experts // ranks + 1 if slots is None else slots
    check_deployment(trace.n_experts, ranks, slots)
    settings = trace_settings(trace, gammas, ranks, slots, link_share, say)
    if quality is not None:
        settings = quality.completed(settings, link_share)
    return _advised(
        settings,
        deployment._replace(experts_per_rank=slots),
        budget,
        trace,
        source=trace.source,
        model=trace.model,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        layers=trace.n_layers,
        steps=trace.n_steps,
        decode_steps=trace.decode_steps,
        assumed_steps=assumed_steps,
        commands=telling(settings, budget, model=trace.model, ranks=ranks, results=results),
    )


def advise_on_records(quality: Quality, deployment: ServingDeployment, budget: Budget) -> Advised:
    """Return the advice on a model's records alone.

    Raises:
        UsageError: If none of them has a capacity over so many ranks.
    """
    layers = quality.records[0].layers
    local = layers[0].n_experts // max(deployment.ranks, 1)
    check_deployment(layers[0].n_experts, deployment.ranks, local)
    return _advised(
        quality.settings(deployment.link_share),
        deployment._replace(experts_per_rank=local),
        budget,
        None,
        source=f"{len(quality.records)} records",
        model=quality.records[0].model,
        n_experts=layers[0].n_experts,
        top_k=layers[0].top_k,
        layers=len(layers),
        steps=max(record.load.forwards for record in quality.records),
    )


def _advised(
    settings: Sequence[ServingSetting],
    deployment: ServingDeployment,
    budget: Budget,
    trace: Trace | None,
    **about: object,
) -> Advised:
    """Return the advice with the files of what is recommended, else of the placement asked for."""
    axis = axis_of(settings)
    marked = with_front(settings, axis)
    advice = Advice.model_validate(
        about
        | deployment._asdict()
        | {
            "basis": "records" if trace is None else "trace",
            "budget": budget,
            "axis": axis,
            "settings": marked,
            "recommendation": recommend(marked, budget),
            "activation": activation(marked, budget),
            "unknown": unknown(settings, trace),
        }
    )
    place = advice.recommendation.setting
    chosen = None if place is None else advice.settings[place]
    files: dict[str, ServerFile] = {}
    if trace is not None and (chosen is None or chosen.kind != "unchanged"):
        slots, by_program = advice.experts_per_rank, False
        if chosen is not None and (chosen.kind == "placement" or chosen.placement is not None):
            slots = advice.n_experts // advice.ranks + round(chosen.extra) // advice.ranks
            by_program = chosen.by_program
        files |= placement_files(trace, advice.ranks, slots, by_program=by_program)
    if chosen is not None:
        files |= capacity_files(chosen)
    usages = {name: file.usage for name, file in files.items()}
    texts = {name: file.text for name, file in files.items()}
    return Advised(advice.model_copy(update={"files": usages}), texts)


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
            f"experts_per_rank={slots}: {ranks} ranks have space for {ranks * slots} of "
            f"{n_experts} experts; give at least {local}"
        )


def trace_settings(
    trace: Trace,
    gammas: Sequence[float],
    ranks: int,
    slots: int,
    link_share: float = 0.0,
    say: Say = silent,
) -> list[ServingSetting]:
    """Return all settings on a trace.

    They are in the order: unchanged; lossless load balancing; capacities on contiguous placement,
    with one γ for each keeper and with a γ for each layer; those on EPLB's placements; OEA.

    ``slots`` are the experts on a rank, with copies; ``link_share`` is as for
    :func:`capmoe_serve.settings.speedup`; ``say`` takes lines on the progress.

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
        ServingSetting(
            kind="activation",
            method="oea",
            knobs=f"k0={activated.k0}",
            drop_rate=activated.drop_rate,
            active=activated.active,
            active_before=judged.active,
        )
        for activated in activated_by_oea(judged.trace, say)
    ]


def _straggler(outcome: BalanceOutcome) -> float:
    fullest = float(outcome.load_SLR.max(axis=2).sum())
    return fullest * int(outcome.load_SLR.shape[2]) / max(int(outcome.asked_SL.sum()), 1)


@dataclass(frozen=True)
class _Judged:
    """The judged steps, and the unchanged model on them, with which settings are compared."""

    trace: Trace
    gammas: Sequence[float]
    home: SlotPlan
    straggler: float  # of the unchanged model
    active: float  # copies of experts that compute there
    link_share: float
    say: Say

    def _setting(
        self, straggler: float, sent: float, active: float | None, **fields: object
    ) -> ServingSetting:
        """Return a setting by its straggler factor, the share of sent pairs, and active copies."""
        compared = {
            "straggler": straggler,
            "speedup": speedup(straggler, self.straggler, sent, self.link_share),
            "active": active,
            "active_before": self.active,
        }
        return ServingSetting.model_validate(compared | fields)

    def _say_of(self, what: str) -> Say:
        return lambda line: self.say(what + line)

    def balanced(self, outcome: BalanceOutcome) -> ServingSetting:
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
        self, placement: SlotPlan, planned_SLE: Counts | None = None
    ) -> Iterator[ServingSetting]:
        """Yield the capacities on a placement: one γ for all layers, or planned, one for each."""
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
            where = about.get("placement", "contiguous placement")
            what = f"capacities of each {granularity} on {where}: "
            for (named, _), sums in zip(chosen, counter.counted(self._say_of(what)), strict=True):
                for keeper in _BEST if "layer_gammas" in named else keepers:
                    yield self._setting(
                        sums.straggler,
                        1 - sums.drop_rate,
                        sums.mean_active(keeper),
                        kind="capacity",
                        method=keeper,
                        granularity=granularity,
                        drop_rate=sums.drop_rate,
                        pad_waste=sums.pad_waste,
                        dropped_score=sums.lost.get(keeper),
                        **named,
                        **about,
                    )


def _granularities(placement: SlotPlan) -> tuple[Granularity, ...]:
    """Return what can have a capacity: experts without copies, and devices of several slots."""
    experts: tuple[Granularity, ...] = () if placement.redundant else ("expert",)
    return (*experts, "device") if placement.expert_LRN.shape[2] > 1 else experts
