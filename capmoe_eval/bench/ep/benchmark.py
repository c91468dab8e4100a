"""MoE layers under expert parallelism: latency by phase, and the speedup over dropless routing.

Alone it is emulated: every rank's work in turn on one device, and a stated all-to-all. Under
torchrun it is measured on real ranks.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from capmoe_eval.bench.device import add_where, device_of, dtype_name, dtype_of, machine, now
from capmoe_eval.bench.ep.text import table
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.arguments import COUNT, GAMMA, INDEX, PATH, POSITIVE, SECONDS
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.timings.studies import STUDIES, Plan, find_studies

if TYPE_CHECKING:
    import torch

    from capmoe_eval.bench.ep.link import Machine
    from capmoe_eval.bench.ep.measure import Bench, Job
    from capmoe_eval.experiment.timings.schema import Link
    from capmoe_eval.wrapper.parallel.world import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    names = ", ".join(("all", *STUDIES))
    add = parser.add_argument
    add("--study", help=f"sizes, routing and methods of a place of the paper: {names}")
    add(
        "--scale",
        type=COUNT,
        help="divide the layers' widths (default: the study's; 1)",
    )
    add(
        "--batch-divisor",
        type=COUNT,
        help="study: divide the paper's batches (default: the study's)",
    )
    add("--results", type=PATH, default=Path("results/zoo"), help="study: records to take loads of")
    add("--repeats", type=COUNT, default=7)
    add("--warmup", type=INDEX, default=1)
    add("--validate", action="store_true", help="under torchrun: emulate, too, and compare")
    add_where(parser)
    link = parser.add_argument_group("emulated link (default: h20's balance on a CPU)")
    link.add_argument("--machine", help="leave communication in proportion as on: h20, h100")
    link.add_argument("--balance", type=POSITIVE, help="… with so many bytes per FLOP")
    link.add_argument("--bandwidth", type=POSITIVE, help="bytes per second and rank, as they are")
    link.add_argument("--latency", type=SECONDS, help="seconds of an empty exchange, as they are")
    add = parser.add_argument_group("a free grid").add_argument
    add("--shape", default="small", help="sizes of the layer: olmoe, mixtral, small … ")
    add("--ranks", type=COUNT, help="ranks, where they are emulated (default: 8; 6 for Qwen1.5)")
    add("--tokens", type=COUNT, nargs="+", default=[1024], help="tokens of each rank")
    add("--peaks", type=POSITIVE, nargs="+", default=[2.0, 4.0, 7.0], help="peak over mean load")
    add("--together", action="store_true", help="one rank has the popular experts")
    add("--trace", help="loads instead of --peaks: figure1 (of the paper), or a record's file")
    add("--layer", type=INDEX, help="which MoE layer of the record (default: the busiest)")
    add("--gammas", type=GAMMA, nargs="+", default=[1.0, 1.5, 2.0])
    add("--methods", nargs="+", default=["score", "expanded_drop"])
    add(
        "--candidates", nargs="+", default=["local"], help="of expanded_drop: local, global, ranked"
    )
    add("--granularities", nargs="+", default=["expert"], help="expert, device")
    add(
        "--layers",
        type=INDEX,
        default=0,
        help="also the prefill of a model with so many MoE layers",
    )
    add("--prompt", type=COUNT, default=512, help="prefill: tokens of a sequence")


def run(given: argparse.Namespace) -> int:
    """Time what was asked for, print it and write it, one file for each study or grid.

    Raises:
        UsageError: For a value that cannot be.
    """
    from capmoe_eval.bench.ep.jobs import free_job, study_jobs
    from capmoe_eval.bench.ep.measure import Bench
    from capmoe_eval.wrapper.parallel.world import World

    studies = find_studies(given.study) if given.study else ()
    processes, device = process_count(), device_of(given.device)
    _keep_memory()
    link = _link(given, device)
    asked: list[tuple[Plan | None, list[Job]]] = [
        (
            study,
            study_jobs(
                study,
                processes=processes,
                scale=given.scale or study.scale,
                batch_divisor=given.batch_divisor or study.batch_divisor,
                results=given.results,
            ),
        )
        for study in studies
    ] or [(None, [free_job(given, processes)])]
    world = World.join(device) if processes else None
    bench = Bench(
        world,
        device=device,
        dtype=dtype_of(given.dtype, device),
        link=link,
        repeats=given.repeats,
        warmup=given.warmup,
        validate=given.validate,
    )
    for study, jobs in asked:
        _compute(given, study, jobs, bench, world, device)
    return 0


def _compute(
    given: argparse.Namespace,
    study: Plan | None,
    jobs: list[Job],
    bench: Bench,
    world: World | None,
    device: torch.device,
) -> None:
    """Time some jobs and write their file."""
    from capmoe_eval.bench.ep.measure import EMULATED
    from capmoe_eval.experiment.timings import schema

    file = schema.Study(
        schema=schema.Study.SCHEMA,
        command="ep",
        date=now(),
        machine=machine(device),
        study=study.name if study else None,
        place=study.place if study else None,
        why=study.why if study else None,
        kind="measured" if world else "emulated",
        note=None if world else EMULATED,
        backend=world.backend if world else None,
        dtype=dtype_name(dtype_of(given.dtype, device)),
        repeats=given.repeats,
        warmup=given.warmup,
        scale=given.scale or (study.scale if study else 1),
        batch_divisor=(given.batch_divisor or study.batch_divisor) if study else 1,
        runs=tuple(bench.run(job) for job in jobs),
    )
    if process_rank():
        return
    if study is None:
        middle = f"{jobs[0].name}-{jobs[0].ranks}"
    else:
        middle = f"{study.name}-{world.size}" if world else study.name
    path = given.out / f"ep-{middle}-{file.kind}.json"
    file.write(path)
    print(table(file))
    print(f"written: {path}\n")


def _link(given: argparse.Namespace, device: torch.device) -> Link | Machine:
    """Return the emulated link, or the machine whose balance it shall have."""
    import dataclasses

    from capmoe_eval.bench.ep.link import MACHINES, NODE
    from capmoe_eval.experiment.timings.schema import Link

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
        return Link(bandwidth, latency, said)
    name = given.machine or "h20"
    if name not in MACHINES:
        raise bad_choice("machine", name, MACHINES)
    chosen = MACHINES[name]
    if given.balance is not None:
        chosen = dataclasses.replace(
            chosen,
            name=f"a machine as fast as {chosen.name}",
            bandwidth=given.balance * chosen.flops,
        )
    return chosen


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
