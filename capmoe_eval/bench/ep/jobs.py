"""Options of the command line, or a study, as jobs to time."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capmoe_eval.bench.device import say
from capmoe_eval.bench.ep.layer import SHAPES, find_shape
from capmoe_eval.bench.ep.routing import Routing, Skew, Trace, figure_1, record_layer, recorded
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.experiment.timings.studies import FIGURE_1, ModelCase, Plan, Workload
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.method import Method

_TASK = "obqa"  # of the records that a study takes loads from; it is Figure 1's


@dataclass(frozen=True)
class Job:
    """One layer over some ranks, under every batch, routing and method that was asked for.

    Attributes:
        model: The paper's model, None for a free shape.
        shape: The layer that is timed.
        ranks: Ranks R.
        why: Why this routing.
        routings: The sources of the router logits.
        batches: The batches; every rank gets as many sequences.
        methods: The methods; dropless is beside them.
        layers: MoE layers of the prefill; 0 leaves it out.
        scale: The divisor of the model's widths.
        fewer_tokens: The divisor of the number of tokens.
    """

    model: str | None
    shape: Shape
    ranks: int
    why: str
    routings: Sequence[Routing]
    batches: Sequence[Workload]
    methods: Sequence[Method]
    layers: int
    scale: int
    fewer_tokens: float = 1.0


def study_jobs(
    study: Plan, *, processes: int | None, scale: int, batch_divisor: int, results: Path
) -> list[Job]:
    """Return the jobs of a study.

    Args:
        study: The study.
        processes: Real ranks; every model is then spread over these, and one whose experts cannot
            be is left out.
        scale: The divisor of widths and prompts.
        batch_divisor: The divisor of batches.
        results: Directory of the records whose loads are taken.

    Raises:
        UsageError: If the scale does not divide a width, or a record is missing.
    """
    jobs: list[Job] = []
    for case in study.models:
        routings = _routings(case, results)
        shape = _with_experts(SHAPES[case.shape], routings[0])
        ranks = processes or case.ranks
        if shape.n_experts % ranks:
            say(
                f"ep: {study.name}: {case.title} is left out, {ranks} ranks do not divide its "
                "experts"
            )
            continue
        batches = [
            Workload(
                ranks * max(1, round(work.sequences * case.share / batch_divisor / ranks)),
                max(1, round(work.prompt / scale)),
                work.place,
            )
            for work in study.workloads
        ]
        job = Job(
            model=case.title,
            shape=shape.scaled(scale),
            ranks=ranks,
            why=case.why,
            routings=routings,
            batches=batches,
            methods=[
                Method(
                    limit.name,
                    gamma,
                    ep_size=ranks,
                    granularity=limit.granularity,
                    candidates=limit.candidates,
                )
                for limit in study.limits
                for gamma in limit.gammas
            ],
            layers=study.layers,
            scale=scale,
            fewer_tokens=study.workloads[0].tokens / batches[0].tokens,
        )
        if job not in jobs:  # on real ranks, all placements of a model are one
            jobs.append(job)
    return jobs


def _routings(case: ModelCase, results: Path) -> Sequence[Routing]:
    if case.routing == FIGURE_1:
        return [figure_1()]
    if case.routing is not None:
        return recorded(results, case.routing, _TASK)
    return [Skew(peak) for peak in case.peaks]


def _with_experts(shape: Shape, routing: Routing) -> Shape:
    """Return the layer with the experts and the top-k of a trace."""
    if not isinstance(routing, Trace):
        return shape
    return dataclasses.replace(shape, n_experts=routing.n_experts, top_k=routing.top_k)


def free_job(given: argparse.Namespace, processes: int | None) -> Job:
    """Return the job of a free grid.

    Args:
        given: The command line.
        processes: Real ranks, or None where they are emulated.

    Raises:
        UsageError: For a value that cannot be.
    """
    shape = find_shape(given.shape)
    routings: list[Routing] = [Skew(peak, given.together) for peak in given.peaks]
    if given.trace == "figure1":
        routings = [figure_1()]
    elif given.trace is not None:
        routings = [record_layer(Path(given.trace), given.layer)]
    shape = _with_experts(shape, routings[0])
    ranks = processes or given.ranks or (6 if shape.n_experts == 60 else 8)
    if processes and given.ranks not in (None, processes):
        raise UsageError(
            f"ranks={given.ranks}: torchrun started {processes} processes; leave it out"
        )
    experts_per_rank(shape.n_experts, ranks)
    scale = given.scale or 1
    return Job(
        model=None,
        shape=shape.scaled(scale),
        ranks=ranks,
        why="asked for",
        routings=routings,
        batches=[_batch(tokens, given.prompt, given.layers, ranks) for tokens in given.tokens],
        methods=[
            Method(name, gamma, ep_size=ranks, granularity=granularity, candidates=candidates)
            for name in given.methods
            for gamma in given.gammas
            for granularity in given.granularities
            for candidates in (given.candidates if name == "expanded_drop" else ["local"])
        ],
        layers=given.layers,
        scale=scale,
    )


def _batch(tokens: int, prompt: int, layers: int, ranks: int) -> Workload:
    """Return a rank's tokens as sequences; as one where prompts do not matter and do not fit."""
    if tokens % prompt == 0:
        return Workload(ranks * tokens // prompt, prompt)
    if layers:
        raise UsageError(f"prompt={prompt}: {tokens} tokens of a rank are no whole number of them")
    return Workload(ranks, tokens)
