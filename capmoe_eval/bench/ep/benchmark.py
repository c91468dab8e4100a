"""Benchmark `ep`: MoE layers under expert parallelism, emulated or on real ranks."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from capmoe_eval.bench.ep.emulation import MACHINES, NODE, Machine
from capmoe_eval.bench.ep.jobs import Job, free_job, study_jobs
from capmoe_eval.bench.ep.measure import EMULATED, Bench
from capmoe_eval.bench.options import commands
from capmoe_eval.bench.rounds import dtype_name, measured_on, placement
from capmoe_eval.errors import UsageError, check_choice
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.timings.schema import Comparison, Link, Study, Timing, Validation
from capmoe_eval.experiment.timings.studies import Plan, find_studies
from capmoe_eval.wrapper.parallel.world import World


def run(given: argparse.Namespace) -> None:
    """Time a grid or studies, print them and write one file for each."""
    studies = find_studies(given.study) if given.study else ()
    processes, (device, dtype) = process_count(), placement(given)
    if studies:
        _check_free(given)
    if given.validate and not processes:
        raise UsageError(
            "--validate: holds real ranks against the emulation, and there are none; leave it out, "
            "or start them with torchrun --nproc-per-node 2"
        )
    _keep_memory()
    link = emulated_link(given, device)
    asked: list[tuple[str, dict[str, Any], list[Job]]] = []
    for study in studies:
        name = f"{study.name}-{processes}" if processes else study.name
        asked.append((name, *planned(study, given, processes)))
    if not asked:
        job = free_job(given, processes)
        none = {"study": None, "place": None, "why": None, "scale": job.scale, "batch_divisor": 1}
        asked = [(f"{given.shape}-{job.ranks}", none, [job])]
    world = World.join(device) if processes else None
    bench = Bench(world, device, dtype, link, given)
    for name, heading, jobs in asked:
        file = study_file(bench, heading, jobs)
        if not process_rank():
            path = given.out / f"ep-{name}-{file.kind}.json"
            file.write(path)
            print(*_lines(file), f"written: {path}\n", sep="\n")


def _check_free(given: argparse.Namespace) -> None:
    """Refuse an option of a free grid beside studies, which say all of it themselves."""
    for option, declared in commands()["ep"].groups["a free grid"].items():
        if (getattr(given, option[2:]) or None) != (declared.get("default") or None):
            raise UsageError(
                f"{option}: is of a free grid, and --study={given.study} has a grid of its own; "
                "leave one of the two out"
            )


def planned(
    study: Plan, given: argparse.Namespace, processes: int | None
) -> tuple[dict[str, Any], list[Job]]:
    """Return what a study's file says of it, and its jobs."""
    scale, divisor = given.scale or study.scale, given.batch_divisor or study.batch_divisor
    sizes = {"scale": scale, "batch_divisor": divisor}
    heading = {"study": study.name, "place": study.place, "why": study.why, **sizes}
    return heading, study_jobs(study, processes=processes, results=given.results, **sizes)


def study_file(bench: Bench, heading: Mapping[str, Any], jobs: Sequence[Job]) -> Study:
    """Return the file of some jobs, which are timed here."""
    world, given = bench.world, bench.given
    return Study(
        schema=Study.SCHEMA,
        command="ep",
        **measured_on(bench.device),
        kind="measured" if world else "emulated",
        note=None if world else EMULATED,
        backend=world.backend if world else None,
        dtype=dtype_name(bench.dtype),
        repeats=given.repeats,
        warmup=given.warmup,
        runs=tuple(bench.run(job) for job in jobs),
        **heading,
    )


def emulated_link(given: argparse.Namespace, device: torch.device) -> Link | Machine:
    """Return the emulated link, or the machine whose balance it shall have."""
    asked = {"bandwidth": given.bandwidth, "latency": given.latency}
    stated = {name: value for name, value in asked.items() if value is not None}
    in_proportion = given.machine is not None or given.balance is not None
    if stated and in_proportion:
        raise UsageError(
            "bandwidth: a link is either stated (--bandwidth, --latency) or in a machine's "
            "proportion (--machine, --balance)"
        )
    if stated or (device.type == "cuda" and not in_proportion):
        link = replace(NODE, **stated)
        speed = f"{link.bandwidth / 1e9:g} GB/s per rank and direction, {1e6 * link.latency:g} µs"
        return replace(link, source=f"stated: {speed}")
    name = given.machine or "h20"
    check_choice("machine", name, MACHINES)
    machine = MACHINES[name]
    if given.balance is None:
        return machine
    fast = f"a machine as fast as {machine.name}"
    return replace(machine, name=fast, bandwidth=given.balance * machine.flops)


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


def _lines(study: Study) -> Iterator[str]:
    """Yield a file as text: a block for each run, a line for each method."""
    yield f"{study.study or 'ep'}, {study.dtype}, {study.machine.name}"
    yield study.note or f"measured on real processes ({study.backend})"
    for run in study.runs:
        shape, link = run.shape, run.link
        shared = f", shared experts of width {shape.shared}" if shape.shared else ""
        yield (
            f"\n{run.title}: H={shape.hidden} I={shape.intermediate} E={shape.n_experts} "
            f"K={shape.top_k}{shared}; {run.ranks} ranks"
        )
        if link:
            speed = f"{link.bandwidth / 1e9:.3g} GB/s, {1e6 * link.latency:.3g} µs"
            yield f"link: {speed}; {link.source}"
        for point in run.points:
            place = f" ({point.place})" if point.place else ""
            routing, check, prefill = point.routing, point.validation, point.prefill
            yield (
                f"{point.tokens_per_rank} tokens per rank{place}, routing of {routing.source}, "
                f"peak load {routing.peak:.2f} × mean"
            )
            yield from _timing_lines(point.timings, "layer", check)
            if prefill:
                yield f"prefill, {prefill.layers} layers, prompts of {prefill.prompt}"
                yield from _timing_lines(prefill.timings, "prefill", check and check.prefill)


def _timing_lines(
    rows: Sequence[Timing], part: str, check: Validation | Comparison | None
) -> Iterator[str]:
    """Yield a heading and a line per method, in median milliseconds, and an emulation's errors."""
    phases = [phase for phase in rows[0].seconds if phase != "total"]
    yield (
        f"{'method':<38}{'ms':>9}{'speedup':>9}{'quartiles':>14}{'ideal':>7}{'reached':>9}"
        f"{'dropped':>9}  " + "".join(f"{phase:>9}" for phase in phases)
    )
    for row in rows:
        quartiles = f"{row.speedup.low:.2f}–{row.speedup.high:.2f}"
        reached = "–" if row.reached is None else f"{100 * row.reached:.0f} %"
        yield (
            f"{row.method:<38}{1e3 * row.seconds['total'].median:>9.2f}"
            f"{row.speedup.median:>9.2f}{quartiles:>14}{row.ideal_rank:>7.2f}{reached:>9}"
            f"{100 * row.load.dropped_share:>7.1f} %  "
            + "".join(f"{1e3 * row.seconds[phase].median:>9.2f}" for phase in phases)
        )
    for name, error in check.errors.items() if check else ():
        shares = f"total {100 * error.total:+.0f} %, speedup {100 * error.speedup:+.0f} %"
        yield f"  emulated {part}, {name}: {shares}"
