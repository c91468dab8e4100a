"""Advise on a trace, with records of its model if there are any.

All settings are judged on the same steps, the second half of the trace; what is planned, is planned
on the first half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import CONTIGUOUS

from capmoe_serve.advice import Advice, Budget, choose, reason, telling, unknown
from capmoe_serve.balancing import (
    BalanceOutcome,
    compare,
    halves,
    judge,
    judge_least_loaded,
)
from capmoe_serve.capacities import CapacityCounter, Factors, layer_factors
from capmoe_serve.exports import ServerFile, capacity_files, placement_files
from capmoe_serve.pairs import KEEPERS
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
    groups: int = 1  # of neighbouring experts, each of which EPLB keeps on one node
    nodes: int = 1


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
) -> tuple[Advice, dict[str, str]]:
    """Return the advice on a trace, which has steps, and the texts of files for servers by name.

    ``quality`` is the accuracy of its model by records, ``assumed_steps`` says how tokens were put
    into steps if that was assumed, ``results`` is the directory that its commands name, and ``say``
    takes lines on the progress. The files are of what is recommended, else of the placement that
    was asked for.

    Raises:
        UsageError: For another deployment than can be, or γ=∞.
    """
    for gamma in gammas:
        if not 0 < gamma < math.inf:
            raise UsageError(
                f"gammas={gamma:g}: must be finite and above 0, for example --gammas 1 1.5 2"
            )
    ranks, slots = deployment.ranks, deployment.experts_per_rank
    if slots is None:  # one for copies
        slots = -(-(trace.n_experts + 1) // max(ranks, 1))
    deployment = deployment._replace(experts_per_rank=slots)
    check_deployment(trace.n_experts, deployment)
    settings = trace_settings(trace, gammas, deployment, say)
    if quality is not None:
        settings = [quality.completed(setting) for setting in settings]
    axis, chosen = axis_of(settings), choose(settings, budget)
    files: dict[str, ServerFile] = {}
    if chosen is None or chosen.kind != "unchanged":
        served, by_program = slots, False
        if chosen is not None and (chosen.kind == "placement" or chosen.placement is not None):
            served = (trace.n_experts + round(chosen.extra)) // ranks
            by_program = chosen.by_program
        groups, nodes = deployment.groups, deployment.nodes
        files |= placement_files(trace, ranks, served, groups, nodes, by_program=by_program)
    if chosen is not None:
        files |= capacity_files(chosen)
    advice = Advice(
        source=trace.source,
        model=trace.model,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        layers=trace.n_layers,
        ranks=ranks,
        experts_per_rank=slots,
        steps=trace.n_steps,
        decode_steps=trace.decode_steps,
        assumed_steps=assumed_steps,
        link_share=deployment.link_share,
        expert_bytes=deployment.expert_bytes,
        groups=deployment.groups,
        nodes=deployment.nodes,
        budget=budget,
        axis=axis,
        settings=with_front(settings, axis),
        recommended=None if chosen is None else settings.index(chosen),
        sentence=reason(settings, budget),
        unknown=unknown(settings, trace),
        commands=telling(settings, budget, model=trace.model, ranks=ranks, results=results),
        files={name: file.usage for name, file in files.items()},
    )
    return advice, {name: file.text for name, file in files.items()}


def check_deployment(n_experts: int, deployment: ServingDeployment) -> None:
    """Refuse ranks, nodes and groups that cannot be, and too few or many experts on a rank."""
    ranks, slots, _, _, groups, nodes = deployment
    if ranks < 2:
        raise UsageError("ranks=1: one rank waits for no other; give at least 2")
    local = -(-n_experts // ranks)
    slots = local if slots is None else slots
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
    if groups % nodes:
        raise UsageError(
            f"nodes={nodes}: must divide groups={groups}, or EPLB plans without nodes; give the "
            "model's groups of experts by --groups (n_group in its config.json)"
        )


def trace_settings(
    trace: Trace,
    gammas: Sequence[float],
    deployment: ServingDeployment,
    say: Say = silent,
) -> list[ServingSetting]:
    """Return all settings on a trace.

    They are in the order: unchanged; lossless load balancing; capacities on contiguous placement,
    with one γ for each keeper and with a γ for each layer; those on EPLB's placements.

    ``deployment`` says the experts on a rank, with copies; ``say`` takes lines on the progress.

    Raises:
        UsageError: If the experts cannot be spread so, or the judged steps are empty.
    """
    ranks, slots, link_share, _, groups, nodes = deployment
    local = -(-trace.n_experts // ranks)
    extra = 0 if slots is None else slots - local
    load_SLE = trace.loads()
    if not load_SLE[len(load_SLE) // 2 :].any():
        raise UsageError("load_SLE: the second half of the steps has no pair; record more traffic")
    home = contiguous(trace.n_layers, trace.n_experts, ranks, local)
    if len(load_SLE) < 2:  # nothing is left to judge a plan on
        planned_SLE, outcomes = None, [judge(CONTIGUOUS, load_SLE, home)]
        if not home.redundant:
            outcomes.append(judge_least_loaded(load_SLE, ranks))
    else:
        planned_SLE = halves(load_SLE)[0]
        more = (extra,) if extra else ()
        outcomes = compare(load_SLE, ranks, more, groups=groups, nodes=nodes, say=say)
    judged = _Judged(
        trace.second_half(),
        gammas,
        home,
        _straggler(outcomes[0]),
        link_share,
        say,
    )
    settings = [judged.balanced(outcome) for outcome in outcomes]
    settings += judged.capacities(home, planned_SLE)
    if planned_SLE is not None:
        expected_LE = planned_SLE.sum(axis=0)
        for copies in sorted({0, extra}):
            placement = plan_eplb(expected_LE, ranks, local + copies, groups, nodes)
            if not np.array_equal(placement.expert_LRN, home.expert_LRN):
                settings += judged.capacities(placement)
    return settings


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
