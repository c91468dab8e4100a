"""Jobs to time, from a study or from options, and the records that their routing is from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from capmoe_eval.bench.ep.layer import SHAPES, find_shape
from capmoe_eval.bench.ep.skew import Routing, Skew, Trace
from capmoe_eval.bench.rounds import say
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.experiment.timings.studies import FIGURE_1, Plan, Workload
from capmoe_eval.paper.printed import figure
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_class

_TASK = "obqa"  # of the records that a study takes loads from; it is Figure 1's


@dataclass(frozen=True)
class Job:
    """One layer over some ranks, under every batch, routing and method that was asked for."""

    model: str | None  # the paper's model, None for a free shape
    shape: Shape
    ranks: int
    why: str
    routings: Sequence[Routing]  # the sources of the router logits
    batches: Sequence[Workload]  # every rank gets as many sequences
    methods: Sequence[Method]  # dropless is beside them
    layers: int  # MoE layers of the prefill; 0 leaves it out
    scale: int  # the divisor of the model's widths
    fewer_tokens: float = 1.0  # the divisor of the number of tokens


def study_jobs(
    study: Plan, *, processes: int | None, scale: int, batch_divisor: int, results: Path
) -> list[Job]:
    """Return the jobs of a study; a record that is missing is a UsageError.

    Widths and prompts are divided by the scale; loads are taken from the records in ``results``.
    With real processes every model is spread over these, and one whose experts cannot be is left
    out.
    """
    jobs: list[Job] = []
    for case in study.models:
        routings: Sequence[Routing] = [Skew(peak) for peak in case.peaks]
        if case.routing == FIGURE_1:
            routings = [figure_1()]
        elif case.routing is not None:
            routings = recorded(results, case.routing, _TASK)
        shape = _with_experts(SHAPES[case.shape], routings[0])
        ranks = processes or case.ranks
        if shape.n_experts % ranks:
            about = f"ep: {study.name}: {case.title} is left out"
            say(f"{about}, {ranks} ranks do not divide its experts")
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
            methods=[create_method(**knobs, ep_size=ranks) for knobs in study.methods],
            layers=study.layers,
            scale=scale,
            fewer_tokens=study.workloads[0].tokens / batches[0].tokens,
        )
        if job not in jobs:  # on real ranks, all placements of a model are one
            jobs.append(job)
    return jobs


def free_job(given: argparse.Namespace, processes: int | None) -> Job:
    """Return the job of a free grid; ``processes`` is None where ranks are emulated."""
    shape = find_shape(given.shape)
    routings: list[Routing] = [Skew(peak, given.together) for peak in given.peaks]
    if given.trace is not None:
        routings = [_trace(given.trace, given.layer)]
    shape = _with_experts(shape, routings[0])
    ranks = processes or given.ranks or (6 if shape.n_experts == 60 else 8)
    if processes and given.ranks not in (None, processes):
        raise UsageError(
            f"ranks={given.ranks}: torchrun started {processes} processes; leave it out"
        )
    experts_per_rank(shape.n_experts, ranks, "ranks")
    batches = []
    for tokens in given.tokens:
        fits = tokens % given.prompt == 0
        if given.layers and not fits:
            raise UsageError(
                f"prompt={given.prompt}: {tokens} tokens of a rank are no whole number of them"
            )
        prompt = given.prompt if fits else tokens
        batches.append(Workload(ranks * tokens // prompt, prompt))
    scale = given.scale or 1
    return Job(
        model=None,
        shape=shape.scaled(scale),
        ranks=ranks,
        why="asked for",
        routings=routings,
        batches=batches,
        methods=[
            create_method(
                name, gamma, ep_size=ranks, granularity=granularity, candidates=candidates
            )
            for name in given.methods
            for gamma in given.gammas
            for granularity in given.granularities
            for candidates in (given.candidates if _expands(name) else ["local"])
        ],
        layers=given.layers,
        scale=scale,
    )


def _expands(name: str) -> bool:
    """Return whether a method has candidates beside a token's top-k."""
    return "candidates" in declared_knobs(method_class(name))


def _with_experts(shape: Shape, routing: Routing) -> Shape:
    """Return the layer with the experts and the top-k of a trace."""
    if isinstance(routing, Skew):
        return shape
    return replace(shape, n_experts=len(routing.loads[0]), top_k=routing.top_k)


def _trace(name: str, layer: int | None) -> Trace:
    """Return Figure 1, or a layer of a record; without a number, that with the fullest expert."""
    if name == "figure1":
        return figure_1()
    traces = _record_layers(Path(name))
    if layer is None:
        return max(traces, key=lambda trace: max(trace.loads[0]))
    if layer >= len(traces):
        raise UsageError(f"layer={layer}: the record has MoE layers 0 to {len(traces) - 1}")
    return traces[layer]


def figure_1() -> Trace:
    """Return the normalised loads of OLMoE's experts that the paper draws in Figure 1.

    They sum to 82.5, not to 64, so they are taken as proportions: the fullest expert, drawn at 7.2,
    then has 5.6 times the mean.
    """
    return Trace(FIGURE_1, (tuple(figure("fig1_load_svg_vector")),), top_k=8)


def recorded(results: Path, model: str, task: str) -> list[Trace]:
    """Return the MoE layers of a model's baseline record of a task; UsageError if it has none."""
    found = sorted((results / model / task).glob("baseline-*.json"))
    if not found:
        raise UsageError(
            f"results={results}: no baseline record of {model} and {task}; compute one with "
            f"python -m capmoe_eval model={model} method=baseline tasks={task}"
        )
    return _record_layers(found[0], results)


def _record_layers(path: Path, root: Path | None = None) -> list[Trace]:
    """Return every MoE layer of a record; each trace goes on with the layers after its own."""
    record = read_record(path, root)
    loads = tuple(tuple(layer.load_before) for layer in record.layers)
    return [
        Trace(f"{record.model} {record.task} {layer.name}", loads[n:] + loads[:n], layer.top_k)
        for n, layer in enumerate(record.layers)
    ]
