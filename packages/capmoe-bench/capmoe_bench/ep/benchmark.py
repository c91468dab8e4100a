"""Benchmark `ep`: MoE layers under expert parallelism, emulated or on real ranks."""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.paper.printed import figure
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.ranks import World

from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.links import Link, ReferenceMachine, emulated_link
from capmoe_bench.ep.skew import RecordedLoads, Routing, Skew, peak_load
from capmoe_bench.ep.studies import (
    FIGURE_1,
    PLANS,
    ModelCase,
    Shape,
    StudyPlan,
    Workload,
    find_studies,
)
from capmoe_bench.ep.timing import TimedLayer, TimedPrefill, measured_link
from capmoe_bench.rounds import (
    alternate,
    device_and_dtype,
    dtype_name,
    measured_on,
    ratio,
    say,
    write_file,
)
from capmoe_bench.timings import DROPLESS, STUDY_SCHEMA, Spread
from capmoe_bench.timings import EMULATED as EMULATED_KIND

Timing = dict[str, Any]
"""One method's times and its gain over dropless routing, as in the file."""

EMULATED = (
    "EMULATED: each rank's work was timed in turn on one device and the slowest counts; the "
    "all-to-all was not run, its time is latency + bytes / bandwidth"
)
_TASK = "obqa"  # of the records that a study takes loads from; it is Figure 1's
_GAIN = 1.05  # an ideal speedup below has no share that could be told from noise
_PASSES = 3  # over which the device's speed is measured, after one that warms up


@dataclass(frozen=True)
class Job:
    """One layer over some ranks, under every batch, routing and method of a study."""

    model: str  # as the paper's tables call it
    shape: Shape
    ranks: int
    why: str
    routings: Sequence[Routing]  # the sources of the router logits
    batches: Sequence[Workload]  # every rank gets as many sequences
    methods: Sequence[Method]  # dropless is beside them
    layers: int  # MoE layers of the prefill; 0 leaves it out
    scale: int  # the divisor of the model's widths
    fewer_tokens: float  # the divisor of the number of tokens


def run(arguments: argparse.Namespace) -> None:
    """Time studies, print them and write one file for each."""
    studies = find_studies(arguments.study)
    processes, (device, dtype) = process_count(), device_and_dtype(arguments)
    if arguments.validate and not processes:
        raise UsageError(
            "--validate: holds real ranks against the emulation, and there are none; leave it out, "
            "or start them with torchrun --nproc-per-node 2"
        )
    _keep_memory()
    link = emulated_link(arguments, device)
    planned = [(study.name, *plan(study, arguments, processes)) for study in studies]
    timer = JobTimer(World.join(device) if processes else None, device, dtype, link, arguments)
    for name, heading, jobs in planned:
        file = timer.file(heading, jobs)
        if not process_rank():
            ranks = f"{processes}-" if processes else ""
            path = arguments.out / f"ep-{name}-{ranks}{file['kind']}.json"
            write_file(path, file)
            print(*_lines(file), f"written: {path}\n", sep="\n")


def _keep_memory() -> None:
    """Have the C library keep freed memory, as the allocators of GPUs do.

    By default it gives large blocks back, and a pass spends up to a third of its time on getting
    them anew, page by page. Where the library has no such setting, nothing changes.
    """
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)


def plan(
    study: StudyPlan, arguments: argparse.Namespace, processes: int | None = None
) -> tuple[dict[str, Any], list[Job]]:
    """Return what a study's file says of it, and its jobs; a missing record is a UsageError.

    Widths and prompts are divided by the scale; loads are taken from the records in ``results``.
    With real processes every model is spread over these, and one whose experts cannot be is left
    out.
    """
    scale = arguments.scale or study.scale
    batch_divisor = arguments.batch_divisor or study.batch_divisor
    jobs: list[Job] = []
    for case in study.models:
        routings, shape = _routings(case, arguments.results), find_shape(case.shape)
        if isinstance(first := routings[0], RecordedLoads):
            shape = replace(shape, n_experts=len(first.loads[0]), top_k=first.top_k)
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
    if not jobs:
        raise UsageError(f"study={study.name}: its ranks divide no model's experts")
    of_paper = study.name if study in PLANS else None
    sizes = {"scale": scale, "batch_divisor": batch_divisor}
    return {"study": of_paper, "place": study.place, "why": study.why, **sizes}, jobs


def _routings(case: ModelCase, results: Path) -> Sequence[Routing]:
    """Return the routings of a model: wanted peaks, Figure 1's loads, or those of its record.

    The loads of Figure 1 are normalised, but sum to 82.5, not to 64, so they are taken as
    proportions: the fullest expert, drawn at 7.2, then has 5.6 times the mean. The record is the
    baseline's in the model's own batches; without one it is a UsageError.
    """
    if case.routing is None:
        return [Skew(peak, case.together) for peak in case.peaks]
    if case.routing == FIGURE_1:
        return [RecordedLoads(FIGURE_1, (tuple(figure("fig1_load_svg_vector")),), top_k=8)]
    from capmoe_eval.experiment.composition import load_option  # needs Hydra; other studies do not

    batch_size = load_option("model", case.routing).batch_size
    for path in record_paths(results, case.routing, _TASK):
        record = path.name.startswith("baseline-") and read_record(path, results)
        if record and (record.cell.batch_size, record.cell.backend) == (batch_size, "transformers"):
            loads = tuple(tuple(layer.load_before) for layer in record.layers)
            # Each routing goes on with the layers after its own.
            return [
                RecordedLoads(
                    f"{record.model} {_TASK} {layer.name}", loads[n:] + loads[:n], layer.top_k
                )
                for n, layer in enumerate(record.layers)
            ]
    raise UsageError(
        f"results={results}: no baseline record of {case.routing} and {_TASK}; compute one with "
        f"capmoe-eval run model={case.routing} method=baseline tasks={_TASK}"
    )


@dataclass(frozen=True)
class JobTimer:
    """Times jobs: on real ranks where there is a world, emulated otherwise."""

    world: World | None
    device: torch.device  # the device of this process
    dtype: torch.dtype
    link: Link | ReferenceMachine  # the emulated link, or the machine whose balance it shall have
    arguments: argparse.Namespace  # repeats, warmup, validate

    def file(self, heading: Mapping[str, Any], jobs: Sequence[Job]) -> dict[str, Any]:
        """Return the content of the file of some jobs, which are timed here."""
        return {
            "schema": STUDY_SCHEMA,
            "command": "ep",
            **heading,
            "kind": "measured" if self.world else EMULATED_KIND,
            "note": None if self.world else EMULATED,
            **measured_on(self.device),
            "backend": self.world.backend if self.world else None,
            "dtype": dtype_name(self.dtype),
            "repeats": self.arguments.repeats,
            "warmup": self.arguments.warmup,
            "runs": [self._run(job) for job in jobs],
        }

    def _run(self, job: Job) -> dict[str, Any]:
        """Return what the file says of a job; a machine's balance is taken at its first point."""
        shape = job.shape
        setting = LayerSetting(shape, job.ranks, self.device, self.dtype)
        link = None if self.world else self.link
        if isinstance(link, ReferenceMachine):
            logits = job.routings[0].logits(job.batches[0].tokens, shape.n_experts, shape.top_k)
            rate = _expert_rate(TimedLayer(setting, logits))
            link = link.link(rate, self.dtype, width=job.scale, tokens=job.fewer_tokens)
        return {
            "model": job.model,
            "shape": asdict(shape),
            "ranks": job.ranks,
            "experts_per_rank": shape.n_experts // job.ranks,
            "why": job.why,
            "link": link and asdict(link),
            "points": [
                self._point(job, setting, batch, routing, link)
                for batch in job.batches
                for routing in job.routings
            ],
        }

    def _point(
        self, job: Job, setting: LayerSetting, batch: Workload, routing: Routing, link: Link | None
    ) -> dict[str, Any]:
        """Return the timings of one batch under one routing.

        An emulation beside real ranks is timed in the same rounds, in all processes at the same
        time. Ranks on one machine share its memory and whatever else disturbs it, and so must the
        emulation.
        """
        source, shape, tokens = routing.fields(), job.shape, batch.tokens // job.ranks
        peak = f" {source['wanted_peak']:g}" if "wanted_peak" in source else ""
        say(
            f"ep: {job.model}, {job.ranks} ranks, {tokens} tokens per rank, "
            f"routing of {source['source']}{peak}, {len(job.methods)} methods"
        )
        logits = [
            routing.logits(batch.tokens, shape.n_experts, shape.top_k, layer=number)
            for number in range(max(1, job.layers))
        ]
        models: list[list[TimedLayer]] = []
        if self.world:
            models.append(
                [
                    TimedLayer(replace(setting, seed=number), each, self.world)
                    for number, each in enumerate(logits)
                ]
            )
            link = measured_link(self.world, self.device) if self.arguments.validate else None
        if link:
            models.append([TimedLayer(setting, each, link=link) for each in logits])
        prefills = [TimedPrefill(each, tokens, batch.prompt) for each in models if job.layers]
        rounds = {"repeats": self.arguments.repeats, "warmup": self.arguments.warmup}
        rows = time_layers([each[0] for each in models], job.methods, **rounds)
        whole = time_layers(prefills, job.methods, **rounds)
        more: dict[str, Any] = {}
        if whole:
            more["prefill"] = {"layers": job.layers, "prompt": batch.prompt, "timings": whole[0]}
        if self.world and link:
            check = _compared(*rows) | ({"prefill": _compared(*whole)} if whole else {})
            more["validation"] = {"note": EMULATED, "link": asdict(link), **check}
        return {
            "tokens_per_rank": tokens,
            "batch": batch.sequences,
            "prompt": batch.prompt,
            "place": batch.place,
            "routing": {**source, "peak": peak_load(logits[0], shape.top_k)},
            "timings": rows[0],
            **more,
        }


def _expert_rate(layer: TimedLayer) -> float:
    """Return the operations per second of the experts of the fullest rank, dropless."""
    dropless = create_method("baseline")
    times = [layer.run(dropless).seconds["experts"] for _ in range(_PASSES + 1)][1:]
    pairs = max(layer.load(dropless).rank_load)
    return pairs * layer.setting.shape.pair_flops / statistics.median(times)


def time_layers(
    layers: Sequence[TimedLayer | TimedPrefill],
    methods: Iterable[Method],
    *,
    repeats: int,
    warmup: int,
) -> list[tuple[Timing, ...]]:
    """Time layers under several methods, in turn, and dropless beside them.

    Every round passes through all layers once under each method, so that what disturbs the machine
    disturbs all of them; a speedup is taken within a round.

    Returns:
        The rows of every layer: dropless, then each method.
    """
    everyone = {DROPLESS: create_method("baseline")} | {of.label: of for of in methods}

    def once(method: Method) -> list[Mapping[str, float]]:
        return [layer.run(method).seconds for layer in layers]

    sides = {name: partial(once, method) for name, method in everyone.items()}
    rounds = alternate(sides, rounds=repeats, warmup=warmup)
    return [
        tuple(_rows(layer, everyone, {name: [each[n] for each in rounds[name]] for name in rounds}))
        for n, layer in enumerate(layers)
    ]


def _rows(
    layer: TimedLayer | TimedPrefill,
    methods: Mapping[str, Method],
    passes: Mapping[str, list[Mapping[str, float]]],
) -> Iterator[Timing]:
    """Yield a layer's rows, given the seconds of its passes by method."""
    totals = {name: [each["total"] for each in of] for name, of in passes.items()}
    full = layer.load(methods[DROPLESS])
    for name, method in methods.items():
        load, speedup = layer.load(method), ratio(totals[DROPLESS], totals[name])
        ideal = full.fullest_rank / max(1, load.fullest_rank)
        label = {
            "name": method.name,
            "gamma": method.uniform_gamma,  # None where it has none
            "granularity": method.granularity,  # which a capacity bounds
            "candidates": method.setting("candidates"),  # which experts `expanded_drop` adds
        }
        yield {
            "method": name,
            "label": None if name == DROPLESS else label,
            # A measured prefill has the total alone.
            "seconds": {
                part: asdict(Spread.of([p[part] for p in passes[name]])) for part in passes[name][0]
            },
            "speedup": asdict(speedup),  # of the total, over dropless in the same round
            "load": asdict(load),
            # The fullest expert's load before over that after: N_max / max(C, …), the speedup of a
            # rank with one expert that does nothing else.
            "ideal_expert": full.fullest_expert / max(1, load.fullest_expert),
            "ideal_rank": ideal,  # the same of the fullest rank's experts together
            # The speedup's share of that gain; None if that is too small.
            "reached": (speedup.median - 1) / (ideal - 1) if ideal > _GAIN else None,
        }


def _compared(measured: Sequence[Timing], emulated: Sequence[Timing]) -> dict[str, Any]:
    """Return emulated rows, and by what share each misses the one that was measured."""
    errors = {
        ours["method"]: {
            "total": theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"] - 1,
            "speedup": theirs["speedup"]["median"] / ours["speedup"]["median"] - 1,
        }
        for ours, theirs in zip(measured, emulated, strict=True)
    }
    return {"errors": errors, "timings": emulated}


def _lines(study: Mapping[str, Any]) -> Iterator[str]:
    """Yield the speedups of a file: a line for each method of each point."""
    yield f"{study['study'] or study['place']}, {study['dtype']}, {study['machine']['name']}"
    yield study["note"] or f"measured on real processes ({study['backend']})"
    for run in study["runs"]:
        yield f"\n{run['model']}: {Shape(**run['shape'])}; {run['ranks']} ranks"
        for point in run["points"]:
            parts = {"layer": point["timings"]}
            if "prefill" in point:
                parts["prefill"] = point["prefill"]["timings"]
            for part, timings in parts.items():
                for timing in timings:
                    speedup = Spread(**timing["speedup"])
                    yield (
                        f"  {part}, {point['tokens_per_rank']} tokens per rank, "
                        f"{timing['method']}: {speedup.median:.2f}× "
                        f"[{speedup.low:.2f}, {speedup.high:.2f}]"
                    )
