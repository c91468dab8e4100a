"""Benchmark `ep`: MoE layers under expert parallelism, emulated or on real ranks."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.paper.printed import figure
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.ranks import World

from capmoe_bench.ep.emulation import MACHINES, NODE, ReferenceMachine
from capmoe_bench.ep.layer import find_shape
from capmoe_bench.ep.measure import EMULATED, Job, JobTimer
from capmoe_bench.ep.skew import RecordedLoads, Routing, Skew
from capmoe_bench.ep.studies import (
    FIGURE_1,
    PLANS,
    Link,
    Shape,
    StudyPlan,
    Workload,
    find_studies,
)
from capmoe_bench.rounds import device_and_dtype, dtype_name, measured_on, say, write_file
from capmoe_bench.timings import EMULATED as EMULATED_KIND
from capmoe_bench.timings import STUDY_SCHEMA, rows_of

_TASK = "obqa"  # of the records that a study takes loads from; it is Figure 1's


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
    files = [(study.name, *planned(study, arguments, processes)) for study in studies]
    world = World.join(device) if processes else None
    bench = JobTimer(world, device, dtype, link, arguments)
    for name, heading, jobs in files:
        file = study_file(bench, heading, jobs)
        if not process_rank():
            ranks = f"{processes}-" if processes else ""
            path = arguments.out / f"ep-{name}-{ranks}{file['kind']}.json"
            write_file(path, file)
            print(*_lines(file), f"written: {path}\n", sep="\n")


def planned(
    study: StudyPlan, arguments: argparse.Namespace, processes: int | None
) -> tuple[dict[str, Any], list[Job]]:
    """Return what a study's file says of it, and its jobs."""
    scale = arguments.scale or study.scale
    sizes = {"scale": scale, "batch_divisor": arguments.batch_divisor or study.batch_divisor}
    of_paper = study.name if study in PLANS else None
    heading = {"study": of_paper, "place": study.place, "why": study.why, **sizes}
    jobs = study_jobs(study, processes=processes, results=arguments.results, **sizes)
    if not jobs:
        raise UsageError(f"study={study.name}: its ranks divide no model's experts")
    return heading, jobs


def study_file(bench: JobTimer, heading: Mapping[str, Any], jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the content of the file of some jobs, which are timed here."""
    world = bench.world
    return {
        "schema": STUDY_SCHEMA,
        "command": "ep",
        **heading,
        "kind": "measured" if world else EMULATED_KIND,
        "note": None if world else EMULATED,
        **measured_on(bench.device),
        "backend": world.backend if world else None,
        "dtype": dtype_name(bench.dtype),
        "repeats": bench.arguments.repeats,
        "warmup": bench.arguments.warmup,
        "runs": [bench.run(job) for job in jobs],
    }


def emulated_link(arguments: argparse.Namespace, device: torch.device) -> Link | ReferenceMachine:
    """Return the emulated link, or the machine whose balance it shall have."""
    options = {"bandwidth": arguments.bandwidth, "latency": arguments.latency}
    stated = {name: value for name, value in options.items() if value is not None}
    if stated and arguments.machine:
        raise UsageError(
            "bandwidth: a link is either stated (--bandwidth, --latency) or in a machine's "
            "proportion (--machine)"
        )
    if stated or (device.type == "cuda" and not arguments.machine):
        link = replace(NODE, **stated)
        speed = f"{link.bandwidth / 1e9:g} GB/s per rank and direction, {1e6 * link.latency:g} µs"
        return replace(link, source=f"stated: {speed}")
    name = arguments.machine or "h20"
    check_choice("machine", name, MACHINES)
    return MACHINES[name]


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


def study_jobs(
    study: StudyPlan, *, processes: int | None, scale: int, batch_divisor: int, results: Path
) -> list[Job]:
    """Return the jobs of a study; a record that is missing is a UsageError.

    Widths and prompts are divided by the scale; loads are taken from the records in ``results``.
    With real processes every model is spread over these, and one whose experts cannot be is left
    out.
    """
    jobs: list[Job] = []
    for case in study.models:
        routings: Sequence[Routing] = [Skew(peak, case.together) for peak in case.peaks]
        if case.routing == FIGURE_1:
            routings = [figure_1()]
        elif case.routing is not None:
            routings = recorded(results, case.routing, _TASK)
        shape = _with_experts(find_shape(case.shape), routings[0])
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


def _with_experts(shape: Shape, routing: Routing) -> Shape:
    """Return the layer with the experts and the top-k of a trace."""
    if isinstance(routing, Skew):
        return shape
    return replace(shape, n_experts=len(routing.loads[0]), top_k=routing.top_k)


def figure_1() -> RecordedLoads:
    """Return the normalised loads of OLMoE's experts that the paper draws in Figure 1.

    They sum to 82.5, not to 64, so they are taken as proportions: the fullest expert, drawn at 7.2,
    then has 5.6 times the mean.
    """
    return RecordedLoads(FIGURE_1, (tuple(figure("fig1_load_svg_vector")),), top_k=8)


def recorded(results: Path, model: str, task: str) -> list[RecordedLoads]:
    """Return the MoE layers of a model's baseline record of a task, in the model's own batches.

    Without such a record it is a UsageError.
    """
    from capmoe_eval.experiment.composition import load_option  # needs Hydra; other studies do not

    batch_size = load_option("model", model).batch_size
    paths = [
        path
        for path in record_paths(results, model, task)
        if path.name.startswith("baseline-")
        and (cell := read_record(path, results).cell).batch_size == batch_size
        and cell.backend == "transformers"
    ]
    if not paths:
        raise UsageError(
            f"results={results}: no baseline record of {model} and {task}; compute one with "
            f"capmoe-eval run model={model} method=baseline tasks={task}"
        )
    return _record_layers(paths[0], results)


def _record_layers(path: Path, root: Path) -> list[RecordedLoads]:
    """Return every MoE layer of a record; each trace goes on with the layers after its own."""
    record = read_record(path, root)
    loads = tuple(tuple(layer.load_before) for layer in record.layers)
    return [
        RecordedLoads(
            f"{record.model} {record.task} {layer.name}", loads[n:] + loads[:n], layer.top_k
        )
        for n, layer in enumerate(record.layers)
    ]


def _lines(study: Mapping[str, Any]) -> Iterator[str]:
    """Yield the speedups of a file: a line for each method of each point."""
    yield f"{study['study'] or study['place']}, {study['dtype']}, {study['machine']['name']}"
    yield study["note"] or f"measured on real processes ({study['backend']})"
    number = None
    for row in rows_of(study):
        if row["run"] != number:
            number = row["run"]
            shape = Shape(**study["runs"][number]["shape"])
            yield f"\n{row['model']}: {shape}; {row['ranks']} ranks"
        if row["phase"] == "total":
            quartiles = f"[{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]"
            place = f"{row['part']}, {row['tokens_per_rank']} tokens per rank, {row['label']}"
            yield f"  {place}: {row['speedup']:.2f}× {quartiles}"
