"""Advise on a trace, with records of its model if there are any.

All settings are judged on the same steps, the second half of the trace; what is planned, is planned
on the first half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import each_record, record_places
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import CONTIGUOUS, create_method
from capmoe_report.evidence import Evidence, Side

from capmoe_serve.advice import (
    Advice,
    Budget,
    Change,
    ServingDeployment,
    ServingSetting,
    axis_of,
    choose,
    reason,
    telling,
    unknown,
    with_front,
)
from capmoe_serve.balancing import BalanceOutcome, compare, judge
from capmoe_serve.capacities import KEEPERS, CapacityCounter, Granularity
from capmoe_serve.exports import ServerFile, placement_files
from capmoe_serve.placements import SlotPlan, contiguous
from capmoe_serve.trace import Trace


def advise_on_trace(
    trace: Trace,
    gammas: Sequence[float],
    deployment: ServingDeployment,
    budget: Budget,
    *,
    quality: Quality | None = None,
    assumed_steps: str | None = None,
    results: str = "results/mine",
) -> tuple[Advice, dict[str, str]]:
    """Return the advice on a trace, which has steps, and the texts of files for servers by name.

    ``quality`` is the accuracy of its model by records, ``assumed_steps`` says how tokens were put
    into steps if that was assumed, and ``results`` is the directory that its commands name. The
    files are of what is recommended, else of the placement that was asked for.

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
    deployment = deployment.model_copy(update={"experts_per_rank": slots})
    check_deployment(trace.n_experts, deployment)
    settings = trace_settings(trace, gammas, deployment)
    if quality is not None:
        settings = [quality.completed(setting) for setting in settings]
    axis, chosen = axis_of(settings), choose(settings, budget)
    files: dict[str, ServerFile] = {}
    if chosen is None or chosen.kind != "unchanged":
        if chosen is not None and (chosen.kind == "placement" or chosen.placement is not None):
            slots = (trace.n_experts + round(chosen.extra)) // ranks
        files = placement_files(trace, ranks, slots, deployment.groups, deployment.nodes)
    advice = Advice(
        **dict(deployment),
        source=trace.source,
        model=trace.model,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        layers=trace.n_layers,
        steps=trace.n_steps,
        decode_steps=trace.decode_steps,
        assumed_steps=assumed_steps,
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
    ranks, slots = deployment.ranks, deployment.experts_per_rank
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
    if deployment.groups % deployment.nodes:
        raise UsageError(
            f"nodes={deployment.nodes}: must divide groups={deployment.groups}, or EPLB plans "
            "without nodes; give the model's groups of experts by --groups (n_group in its "
            "config.json)"
        )


def trace_settings(
    trace: Trace, gammas: Sequence[float], deployment: ServingDeployment
) -> list[ServingSetting]:
    """Return all settings on a trace.

    They are in the order: unchanged; EPLB's placements; capacities on contiguous placement, then on
    those of EPLB.

    Raises:
        UsageError: If the experts cannot be spread so, or the judged steps are empty.
    """
    load_SLE, ranks = trace.loads(), deployment.ranks
    if not load_SLE[len(load_SLE) // 2 :].any():
        raise UsageError("load_SLE: the second half of the steps has no pair; record more traffic")
    home = contiguous(trace.n_layers, trace.n_experts, ranks)
    if len(load_SLE) < 2:  # nothing is left to judge a plan on
        outcomes = [judge(CONTIGUOUS, load_SLE, home)]
    else:
        local = home.expert_LRN.shape[2]
        extra = (deployment.experts_per_rank or local) - local
        more = (extra,) if extra else ()
        outcomes = compare(load_SLE, ranks, more, deployment.groups, deployment.nodes)
    unchanged = _straggler(outcomes[0])

    def setting(straggler: float, sent: float, **fields: object) -> ServingSetting:
        """Return a setting by its straggler factor and the share of the pairs that is sent."""
        fast = speedup(straggler, unchanged, sent, deployment.link_share)
        return ServingSetting.model_validate({"straggler": straggler, "speedup": fast} | fields)

    moves = [
        {
            "extra": float(outcome.placement.redundant),
            "set_up": float(outcome.placement.moved_from(home).mean()),
        }
        for outcome in outcomes
    ]
    settings = [
        setting(
            _straggler(outcome),
            1.0,
            kind="unchanged" if outcome is outcomes[0] else "placement",
            method=outcome.method,
            **moved,
        )
        for outcome, moved in zip(outcomes, moves, strict=True)
    ]
    judged = trace.second_half()
    for number, (outcome, moved) in enumerate(zip(outcomes, moves, strict=True)):
        placement, is_home = outcome.placement, number == 0
        if not is_home and np.array_equal(placement.expert_LRN, home.expert_LRN):
            continue
        for granularity in _granularities(placement):
            counted = CapacityCounter(judged, gammas, placement, granularity).counted()
            settings += [
                setting(
                    sums.straggler,
                    1 - sums.drop_rate,
                    kind="capacity",
                    method=keeper,
                    gamma=float(gamma),
                    granularity=granularity,
                    drop_rate=sums.drop_rate,
                    pad_waste=sums.pad_waste,
                    dropped_score=sums.lost.get(keeper),
                    **({} if is_home else {"placement": outcome.method, **moved}),
                )
                for gamma, sums in zip(gammas, counted, strict=True)
                # Who is kept changes no load: on a placement only the best is looked at.
                for keeper in (KEEPERS if is_home else KEEPERS[:1])
            ]
    return settings


def _straggler(outcome: BalanceOutcome) -> float:
    """Return the pairs of the fullest rank over a rank's mean, both summed over steps."""
    fullest = float(outcome.load_SLR.max(axis=2).sum())
    return fullest * outcome.placement.ranks / max(int(outcome.asked_SL.sum()), 1)


def speedup(straggler: float, unchanged: float, sent: float, link_share: float) -> float:
    """Return the bound on the speedup of a layer's expert step.

    The step's time is taken as a part that follows the fullest rank, and a part, ``link_share`` of
    the time before, that follows the pairs that are sent at all. Launches, gathering, attention and
    transfers of weights are left out, so the whole model gains less.

    Args:
        straggler: Straggler factor of the setting.
        unchanged: Straggler factor before.
        sent: Pairs that are sent over those before: 1 without drops.
        link_share: Share of the expert step's time that the link takes before, from 0 to 1.
    """
    after = (1 - link_share) * straggler / unchanged + link_share * sent
    return 1 / max(after, 1e-9)


def _granularities(placement: SlotPlan) -> Iterator[Granularity]:
    """Yield what can have a capacity: experts without copies, and devices of several slots."""
    if not placement.redundant:
        yield "expert"
    if placement.expert_LRN.shape[2] > 1:
        yield "device"


_BASELINE = Side(method="baseline")
# The placements of settings that records may be of, by the names that settings have for them.
_PLACEMENTS: Final = {None: CONTIGUOUS, "EPLB": "eplb"}


def read_records(root: Path, model: str) -> tuple[Record, ...]:
    """Return the whole records of one model in a results directory.

    Raises:
        UsageError: If there is none.
    """
    models: dict[str, list[tuple[Path, Path]]] = {}
    for path, directory in record_places(root):
        models.setdefault(path.parent.parent.name, []).append((path, directory))
    records = tuple(each_record(models.get(model, ()), []))
    if not records:
        names = sorted(models)
        there = f"it has {', '.join(names)}" if names else "it has none of any model"
        raise UsageError(f"results={shown(root)}: no whole record of model {model}; {there}")
    return records


class Quality:
    """The accuracy of one model under capacities, by its records."""

    def __init__(self, records: Sequence[Record], ranks: int) -> None:
        self._ranks = ranks
        self._model = records[0].model
        self._evidence = Evidence(profile="", results=results_of(records))

    def change(self, method: Method) -> Change | None:
        """Return the change of accuracy under a method, or None if no records pair.

        All seeds of ``random`` are one side, as everywhere. Records of a capacity of devices are
        of the placement that is asked for, and of no other.
        """
        # What has no effect is not part of an identity, and would not be found with another value.
        side = Side.model_validate({"ep_size": method.ep_size} | method.identity())
        effect = self._evidence.effect(side, _BASELINE)
        if effect.points is None:
            return None
        low, high = effect.interval()
        return Change(
            effect=effect.points,
            low=low,
            high=high,
            documents=effect.documents,
            tasks=tuple(sorted(effect.tasks[self._model])),
            drop_rate=float(self._evidence.pick(side, self._model)["drop_rate"].mean()),
        )

    def completed(self, setting: ServingSetting) -> ServingSetting:
        """Return a setting with its change of accuracy where records have it.

        A record's capacity of each expert drops the same on every placement, that of a device does
        not: it is of the record's own placement, contiguous or EPLB's without copies, which its own
        calibration planned. No record has copies, or the γ of each layer that a trace chose.
        """
        placement = _PLACEMENTS.get(setting.placement)
        if setting.granularity == "expert":
            placement = CONTIGUOUS
        if setting.kind != "capacity" or setting.gamma is None or placement is None:
            return setting
        of = {"granularity": setting.granularity, "placement": placement}
        method = create_method(setting.method, setting.gamma, ep_size=self._ranks, **of)
        return setting.model_copy(update={"change": self.change(method)})
