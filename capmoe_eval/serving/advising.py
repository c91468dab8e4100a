"""Advise on a trace, with records of its model if there are any, or on records alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.status_lines import Say, silent
from capmoe_eval.serving.advice import Advice, Budget, activation, recommend, telling, unknown
from capmoe_eval.serving.exports import ServerFile, capacity_files, placement_files
from capmoe_eval.serving.front import axis_of, with_front
from capmoe_eval.serving.quality import Quality
from capmoe_eval.serving.settings import Setting
from capmoe_eval.serving.trace import Trace
from capmoe_eval.serving.trace_settings import check_deployment, trace_settings


class Deployment(NamedTuple):
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
    deployment: Deployment,
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


def advise_on_records(quality: Quality, deployment: Deployment, budget: Budget) -> Advised:
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
    settings: Sequence[Setting],
    deployment: Deployment,
    budget: Budget,
    trace: Trace | None,
    **about: object,
) -> Advised:
    """Return the advice on settings with its files: those of what is recommended.

    Where nothing is, they are of the placement that was asked for; without a trace there is none.
    """
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
            by_program = chosen.method.startswith("LPLB")
        files |= placement_files(trace, advice.ranks, slots, by_program=by_program)
    if chosen is not None:
        files |= capacity_files(chosen)
    usages = {name: file.usage for name, file in files.items()}
    texts = {name: file.text for name, file in files.items()}
    return Advised(advice.model_copy(update={"files": usages}), texts)
