"""Options of the command line, or a study, as jobs to time, and where their routing is from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.bench.device import say
from capmoe_eval.bench.ep.layer import SHAPES, find_shape
from capmoe_eval.bench.ep.skew import skewed_logits, traced_logits
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.experiment.timings.studies import FIGURE_1, ModelCase, Plan, Workload
from capmoe_eval.paper.printed import figure
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.method import Method

_TASK = "obqa"  # of the records that a study takes loads from; it is Figure 1's
_FIGURE_1_TOP_K = 8  # of OLMoE


@dataclass(frozen=True)
class Skew:
    """Popularities with a wanted peak; every layer has its own popular experts."""

    peak: float  # the fullest expert's load over the mean
    together: bool = False  # the popular experts are on one rank

    def logits(self, n_tokens: int, n_experts: int, top_k: int, layer: int = 0) -> Tensor:
        """Return router logits [T, E] of a layer; the first is the one that is timed alone."""
        return skewed_logits(
            n_tokens, n_experts, top_k, self.peak, together=self.together, seed=layer
        )

    def said(self) -> dict[str, Any]:
        """Return the fields of the file that say what was wanted."""
        return {"source": "peak", "wanted_peak": self.peak, "together": self.together}


@dataclass(frozen=True)
class Trace:
    """Loads that a model's experts have been seen with; a timed layer has as many experts."""

    source: str  # the name of that layer, for the file
    loads: tuple[tuple[float, ...], ...]  # the load of every expert, for each layer that was seen
    top_k: int  # experts K per token of that model

    def logits(self, n_tokens: int, n_experts: int, top_k: int, layer: int = 0) -> Tensor:
        """Return router logits [T, E] of a layer; the first is the one that is timed alone.

        Layers beyond those that were seen have the same loads over other experts, shuffled.
        """
        load_E = torch.tensor(self.loads[layer % len(self.loads)], dtype=torch.float64)
        if layer >= len(self.loads):
            generator = torch.Generator().manual_seed(layer)
            load_E = load_E[torch.randperm(n_experts, generator=generator)]
        return traced_logits(n_tokens, load_E, top_k, seed=layer)

    def said(self) -> dict[str, Any]:
        """Return the field of the file that says where the loads were seen."""
        return {"source": self.source}


Routing = Skew | Trace


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
    """Return the jobs of a study.

    Widths and prompts are divided by the scale; loads are taken from the records in ``results``.
    With real processes every model is spread over these, and one whose experts cannot be is left
    out.

    Raises:
        UsageError: If the scale does not divide a width, or a record is missing.
    """
    jobs: list[Job] = []
    for case in study.models:
        routings = _routings(case, results)
        shape = _with_experts(SHAPES[case.shape], routings[0])
        ranks = processes or case.ranks
        if shape.n_experts % ranks:
            why = f"{ranks} ranks do not divide its experts"
            say(f"ep: {study.name}: {case.title} is left out, {why}")
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
            methods=[Method(**knobs, ep_size=ranks) for knobs in study.methods],
            layers=study.layers,
            scale=scale,
            fewer_tokens=study.workloads[0].tokens / batches[0].tokens,
        )
        if job not in jobs:  # on real ranks, all placements of a model are one
            jobs.append(job)
    return jobs


def free_job(given: argparse.Namespace, processes: int | None) -> Job:
    """Return the job of a free grid; ``processes`` is None where ranks are emulated.

    Raises:
        UsageError: For a value that cannot be.
    """
    shape = find_shape(given.shape)
    routings: list[Routing] = [Skew(peak, given.together) for peak in given.peaks]
    if given.trace == "figure1":
        routings = [figure_1()]
    elif given.trace is not None:
        routings = [_record_layer(Path(given.trace), given.layer)]
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


def _with_experts(shape: Shape, routing: Routing) -> Shape:
    """Return the layer with the experts and the top-k of a trace."""
    if isinstance(routing, Skew):
        return shape
    return replace(shape, n_experts=len(routing.loads[0]), top_k=routing.top_k)


def _routings(case: ModelCase, results: Path) -> Sequence[Routing]:
    if case.routing == FIGURE_1:
        return [figure_1()]
    if case.routing is not None:
        return recorded(results, case.routing, _TASK)
    return [Skew(peak) for peak in case.peaks]


def figure_1() -> Trace:
    """Return the normalised loads of OLMoE's experts that the paper draws in Figure 1.

    They sum to 82.5, not to 64, so they are taken as proportions: the fullest expert, drawn at 7.2,
    then has 5.6 times the mean.
    """
    return Trace(FIGURE_1, (tuple(figure("fig1_load_svg_vector")),), _FIGURE_1_TOP_K)


def recorded(results: Path, model: str, task: str) -> list[Trace]:
    """Return the MoE layers of a model's baseline record of a task below ``results_dir``.

    Raises:
        UsageError: If there is no such record.
    """
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
    loads = [tuple(layer.load_before) for layer in record.layers]
    return [
        Trace(
            f"{record.model} {record.task} {layer.name}",
            (*loads[number:], *loads[:number]),
            layer.top_k,
        )
        for number, layer in enumerate(record.layers)
    ]


def _record_layer(path: Path, number: int | None) -> Trace:
    """Return a layer of a record; without a number, the one with the fullest expert."""
    traces = _record_layers(path)
    if number is None:
        return max(traces, key=lambda trace: max(trace.loads[0]))
    if number >= len(traces):
        raise UsageError(f"layer={number}: the record has MoE layers 0 to {len(traces) - 1}")
    return traces[number]
