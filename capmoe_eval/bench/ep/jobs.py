"""What was asked for on the command line, or by a study, as jobs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.bench.device import say
from capmoe_eval.bench.ep.emulation import Reduction
from capmoe_eval.bench.ep.layer import SHAPES, find_shape
from capmoe_eval.bench.ep.measure import Batch, Job
from capmoe_eval.bench.ep.routing import Routing, Skew, Trace, figure_1, record_layer, recorded
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.studies import FIGURE_1, ModelCase, Plan
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.method import Method

TASK = "obqa"
"""The task of the records that a study takes loads from; it is Figure 1's."""


def study_jobs(
    study: Plan, *, processes: int | None, scale: int, batch_divisor: int, results: Path
) -> list[Job]:
    """Return the jobs of a study.

    Args:
        study: The study.
        processes: Real ranks; every model is then spread over these, and one whose experts cannot
            be is left out.
        scale: What widths and prompts are divided by.
        batch_divisor: What batches are divided by.
        results: Directory of the records whose loads are taken.

    Raises:
        UsageError: If the scale does not divide a width, or a record is missing.
    """
    jobs: list[Job] = []
    for case in study.models:
        shape = SHAPES[case.shape]
        routings = _routings(case, results)
        if isinstance(routings[0], Trace):  # the sizes of the layer, the experts of the record
            trace = routings[0]
            shape = dataclasses.replace(shape, n_experts=trace.n_experts, top_k=trace.top_k)
        ranks = processes or case.ranks
        if shape.n_experts % ranks:
            say(
                f"ep: {study.name}: {case.title} is left out, {ranks} ranks do not divide its "
                "experts"
            )
            continue
        batches = [
            _batch(work.batch * case.share / batch_divisor, work.prompt / scale, ranks, work.place)
            for work in study.workloads
        ]
        whole = study.workloads[0].batch * study.workloads[0].prompt
        reduction = Reduction(scale, whole / (batches[0].tokens * ranks))
        methods = [
            Method(
                limit.name,
                gamma,
                ep_size=ranks,
                granularity=limit.granularity,
                candidates=limit.candidates,
            )
            for limit in study.limits
            for gamma in limit.gammas
        ]
        job = Job(
            model=case.title,
            name=case.shape,
            shape=shape.scaled(scale),
            ranks=ranks,
            why=case.why,
            routings=routings,
            batches=batches,
            methods=methods,
            layers=study.layers,
            reduction=reduction,
        )
        if job not in jobs:  # on real ranks, all placements of a model are one
            jobs.append(job)
    return jobs


def _routings(case: ModelCase, results: Path) -> Sequence[Routing]:
    if case.routing == FIGURE_1:
        return [figure_1()]
    if case.routing is not None:
        return recorded(results, case.routing, TASK)
    return [Skew(peak) for peak in case.peaks]


def _batch(sequences: float, prompt: float, ranks: int, place: str | None) -> Batch:
    return Batch(max(1, round(sequences / ranks)), max(1, round(prompt)), place)


def free_job(given: argparse.Namespace, processes: int | None) -> Job:
    """Return the job of a free grid.

    Args:
        given: The command line.
        processes: Real ranks, or None where they are emulated.

    Raises:
        UsageError: For a value that cannot be.
    """
    shape = find_shape(given.shape)
    routings: Sequence[Routing] = [Skew(peak, given.together) for peak in given.peaks]
    if given.trace is not None:  # the sizes of the layer, the experts of the record
        trace = _trace(given.trace, given.layer)
        shape = dataclasses.replace(shape, n_experts=trace.n_experts, top_k=trace.top_k)
        routings = [trace]
    ranks = processes or given.ranks or (6 if shape.n_experts == 60 else 8)
    if processes and given.ranks not in (None, processes):
        raise UsageError(
            f"ranks={given.ranks}: torchrun started {processes} processes; leave it out"
        )
    experts_per_rank(shape.n_experts, ranks)
    scale = given.scale or 1
    return Job(
        model=None,
        name=given.shape,
        shape=shape.scaled(scale),
        ranks=ranks,
        why="asked for",
        routings=routings,
        batches=[_tokens(tokens, given.prompt, given.layers) for tokens in given.tokens],
        methods=_methods(given, ranks),
        layers=given.layers,
        reduction=Reduction(scale),
    )


def _trace(given: str, layer: int | None) -> Trace:
    if given == "figure1":
        return figure_1()
    return record_layer(Path(given), layer)


def _tokens(tokens: int, prompt: int, layers: int) -> Batch:
    """Return a rank's tokens as sequences; as one where prompts do not matter and do not fit."""
    if tokens % prompt == 0:
        return Batch(tokens // prompt, prompt)
    if layers:
        raise UsageError(f"prompt={prompt}: {tokens} tokens of a rank are no whole number of them")
    return Batch(1, tokens)


def _methods(given: argparse.Namespace, ranks: int) -> list[Method]:
    return [
        Method(name, gamma, ep_size=ranks, granularity=granularity, candidates=candidates)
        for name in given.methods
        for gamma in given.gammas
        for granularity in given.granularities
        for candidates in (given.candidates if name == "expanded_drop" else ["local"])
    ]
