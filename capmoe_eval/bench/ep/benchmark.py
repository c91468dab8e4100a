"""Benchmark `ep`: MoE layers under expert parallelism, emulated or on real ranks."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
from typing import Any

import torch

from capmoe_eval.bench.alternate import now
from capmoe_eval.bench.device import device_of, dtype_name, dtype_of, machine
from capmoe_eval.bench.ep.jobs import Job, free_job, study_jobs
from capmoe_eval.bench.ep.link import MACHINES, NODE, Machine
from capmoe_eval.bench.ep.measure import EMULATED, Bench
from capmoe_eval.bench.ep.text import table
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.timings import schema
from capmoe_eval.experiment.timings.studies import find_studies
from capmoe_eval.wrapper.parallel.world import World


def run(given: argparse.Namespace) -> None:
    """Time a grid or studies, print them and write one file for each.

    Raises:
        UsageError: For a value that cannot be.
    """
    studies = find_studies(given.study) if given.study else ()
    processes, device = process_count(), device_of(given.device)
    dtype = dtype_of(given.dtype, device)
    _keep_memory()
    link = _link(given, device)
    asked: list[tuple[str, dict[str, Any], list[Job]]] = []
    for study in studies:
        sizes = {
            "scale": given.scale or study.scale,
            "batch_divisor": given.batch_divisor or study.batch_divisor,
        }
        said = {"study": study.name, "place": study.place, "why": study.why, **sizes}
        jobs = study_jobs(study, processes=processes, results=given.results, **sizes)
        name = f"{study.name}-{processes}" if processes else study.name
        asked.append((name, said, jobs))
    if not asked:
        job = free_job(given, processes)
        none = {"study": None, "place": None, "why": None, "scale": job.scale, "batch_divisor": 1}
        asked = [(f"{given.shape}-{job.ranks}", none, [job])]
    world = World.join(device) if processes else None
    bench = Bench(world, device, dtype, link, given.repeats, given.warmup, given.validate)
    for name, said, jobs in asked:
        file = schema.Study(
            schema=schema.Study.SCHEMA,
            command="ep",
            date=now(),
            machine=machine(device),
            kind="measured" if world else "emulated",
            note=None if world else EMULATED,
            backend=world.backend if world else None,
            dtype=dtype_name(dtype),
            repeats=given.repeats,
            warmup=given.warmup,
            runs=tuple(bench.run(job) for job in jobs),
            **said,
        )
        if not process_rank():
            path = given.out / f"ep-{name}-{file.kind}.json"
            file.write(path)
            print(f"{table(file)}\nwritten: {path}\n")


def _link(given: argparse.Namespace, device: torch.device) -> schema.Link | Machine:
    """Return the emulated link, or the machine whose balance it shall have."""
    stated = given.bandwidth is not None or given.latency is not None
    in_proportion = given.machine is not None or given.balance is not None
    if stated and in_proportion:
        raise UsageError(
            "bandwidth: a link is either stated (--bandwidth, --latency) or in a machine's "
            "proportion (--machine, --balance)"
        )
    if stated or (device.type == "cuda" and not in_proportion):
        bandwidth = NODE.bandwidth if given.bandwidth is None else given.bandwidth
        latency = NODE.latency if given.latency is None else given.latency
        said = f"stated: {bandwidth / 1e9:g} GB/s per rank and direction, {1e6 * latency:g} µs"
        return schema.Link(bandwidth, latency, said)
    name = given.machine or "h20"
    if name not in MACHINES:
        raise bad_choice("machine", name, MACHINES)
    chosen = MACHINES[name]
    if given.balance is None:
        return chosen
    return dataclasses.replace(
        chosen, name=f"a machine as fast as {chosen.name}", bandwidth=given.balance * chosen.flops
    )


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
