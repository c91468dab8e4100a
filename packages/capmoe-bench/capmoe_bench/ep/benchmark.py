"""Benchmark `ep`: MoE layers under expert parallelism, emulated or on real ranks."""

import argparse
import ctypes
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torch import Tensor

from capmoe_bench.ep.layer import LayerSetting, find_shape
from capmoe_bench.ep.links import Link, balanced_link, emulated_link
from capmoe_bench.ep.skew import logits_of_loads, peak_load, skewed_logits
from capmoe_bench.ep.studies import ModelCase, Shape, StudyPlan, Workload, find_studies
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
from capmoe_bench.timings import DROPLESS, FIGURE_1, STUDIES, STUDY_SCHEMA, Spread, study_rows
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


Routing = tuple[dict[str, Any], Callable[..., Tensor]]
"""A source of router logits [T, E] of T, E, K and a layer, and what the file says of the source."""
Job = tuple[ModelCase, LayerSetting, list[Workload], list[Routing]]
"""A model of a study, its layer over some ranks with divided widths, its divided batches, and the
routings of each batch."""


def run(arguments: argparse.Namespace) -> None:
    """Time studies, print them and write one file for each."""
    sizes = {"scale": arguments.scale, "batch_divisor": arguments.batch_divisor}
    studies = find_studies(arguments.study, **sizes)
    processes, (device, dtype) = process_count(), device_and_dtype(arguments)
    if arguments.validate and not processes:
        raise UsageError(
            "--validate: holds real ranks against the emulation, and there are none; leave it out, "
            "or start them with torchrun --nproc-per-node 2"
        )
    _keep_memory()
    link = emulated_link(arguments, device)
    planned = [
        (study, plan(study, arguments.results, device, dtype, processes)) for study in studies
    ]
    world = World.join(device) if processes else None
    for study, jobs in planned:
        file = StudyTimer(study, arguments, world).file(jobs, link)
        if not process_rank():
            ranks = f"{processes}-" if processes else ""
            path = arguments.out / f"ep-{study.name}-{ranks}{file['kind']}.json"
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
    study: StudyPlan,
    results: Path,
    device: torch.device,
    dtype: torch.dtype,
    processes: int | None = None,
) -> list[Job]:
    """Return the jobs of a study; recorded loads are those of the records in ``results``.

    With real processes every model is spread over these, which makes all placements of a model one.
    A model whose experts cannot be spread is left out; a study without any is a UsageError.
    """
    jobs: list[Job] = []
    for case in dict.fromkeys(replace(of, ranks=processes or of.ranks) for of in study.models):
        (shape, routings), ranks = _routings(case, results), case.ranks
        if shape.n_experts % ranks:
            about = f"ep: {study.name}: {case.title} is left out"
            say(f"{about}, {ranks} ranks do not divide its experts")
            continue
        batches = [
            Workload(
                ranks * max(1, round(work.sequences * case.share / study.batch_divisor / ranks)),
                max(1, round(work.prompt / study.scale)),
                work.place,
            )
            for work in study.workloads
        ]
        setting = LayerSetting(shape.scaled(study.scale), ranks, device, dtype)
        jobs.append((case, setting, batches, routings))
    if not jobs:
        raise UsageError(f"study={study.name}: its ranks divide no model's experts")
    return jobs


def _routings(case: ModelCase, results: Path) -> tuple[Shape, list[Routing]]:
    """Return a model's layer and routings: wanted peaks, or the loads of Figure 1 or of a record.

    The layer has as many experts and as large a top-k as the loads are of. The loads of Figure 1
    are normalised, but sum to 82.5, not to 64, so they are taken as proportions: the fullest
    expert, drawn at 7.2, then has 5.6 times the mean. The record is the baseline's in the model's
    own batches; a missing one is a UsageError.
    """
    shape = find_shape(case.shape)
    if case.routing is None:
        return shape, [
            ({"source": "peak", "wanted_peak": peak}, partial(skewed_logits, peak))
            for peak in case.peaks
        ]
    if case.routing == FIGURE_1:
        loads = (figure("fig1_load_svg_vector"),)
        of_loads = replace(shape, n_experts=64, top_k=8)
        return of_loads, [({"source": FIGURE_1}, partial(logits_of_loads, loads))]
    from capmoe_eval.experiment.composition import load_option  # needs Hydra; other studies do not

    batch_size = load_option("model", case.routing).batch_size
    for path in record_paths(results, case.routing, _TASK):
        record = path.name.startswith("baseline-") and read_record(path, results)
        if record and (record.cell.batch_size, record.cell.backend) == (batch_size, "transformers"):
            seen = [layer.load_before for layer in record.layers]
            first = record.layers[0]
            return replace(shape, n_experts=first.n_experts, top_k=first.top_k), [
                # Each routing goes on with the layers after its own.
                (
                    {"source": f"{record.model} {_TASK} {layer.name}"},
                    partial(logits_of_loads, seen[number:] + seen[:number]),
                )
                for number, layer in enumerate(record.layers)
            ]
    raise UsageError(
        f"results={results}: no baseline record of {case.routing} and {_TASK}; compute one with "
        f"capmoe-eval run model={case.routing} method=baseline tasks={_TASK}"
    )


@dataclass(frozen=True)
class StudyTimer:
    """Times the jobs of a study, on real ranks where there is a world and emulated otherwise."""

    study: StudyPlan
    arguments: argparse.Namespace  # with repeats, warmup and validate
    world: World | None = None

    def file(self, jobs: Sequence[Job], link: Link | str) -> dict[str, Any]:
        """Return the file of the jobs; a link is emulated, or has the balance of a machine."""
        study, world, setting = self.study, self.world, jobs[0][1]
        return {
            "schema": STUDY_SCHEMA,
            "command": "ep",
            "study": study.name if study.name in STUDIES else None,
            **{name: getattr(study, name) for name in ("place", "why", "scale", "batch_divisor")},
            "kind": "measured" if world else EMULATED_KIND,
            "note": None if world else EMULATED,
            **measured_on(setting.device),
            "backend": world.backend if world else None,
            "dtype": dtype_name(setting.dtype),
            "repeats": self.arguments.repeats,
            "warmup": self.arguments.warmup,
            "runs": [self._run(job, None if world else link) for job in jobs],
        }

    def _run(self, job: Job, link: Link | str | None) -> dict[str, Any]:
        """Return what the file says of a job; a machine's balance is taken at its first point."""
        case, setting, batches, routings = job
        shape = setting.shape
        if isinstance(link, str):
            tokens = batches[0].tokens
            logits_TE = routings[0][1](tokens, shape.n_experts, shape.top_k)
            rate = _expert_rate(TimedLayer(setting, logits_TE))
            fewer = self.study.workloads[0].tokens / tokens
            link = balanced_link(link, rate, setting.dtype, width=self.study.scale, tokens=fewer)
        points = []
        for batch, routing in itertools.product(batches, routings):
            peak = routing[0].get("wanted_peak")
            say(
                f"ep: {case.title}, {case.ranks} ranks, {batch.tokens // case.ranks} tokens per "
                f"rank, routing of {routing[0]['source']}{'' if peak is None else f' {peak:g}'}, "
                f"{len(self.study.methods)} methods"
            )
            points.append(self._point(setting, batch, routing, link))
        return {
            "model": case.title,
            "shape": asdict(shape),
            "ranks": case.ranks,
            "experts_per_rank": shape.n_experts // case.ranks,
            "why": case.why,
            "link": link and asdict(link),
            "points": points,
        }

    def _point(
        self, setting: LayerSetting, batch: Workload, routing: Routing, link: Link | None
    ) -> dict[str, Any]:
        """Return the timings of one batch under one routing.

        An emulation beside real ranks is timed in the same rounds, in all processes at the same
        time. Ranks on one machine share its memory and whatever else disturbs it, and so must the
        emulation.
        """
        study, world, shape, ranks = self.study, self.world, setting.shape, setting.ranks
        logits = [
            routing[1](batch.tokens, shape.n_experts, shape.top_k, layer=number)
            for number in range(max(1, study.layers))
        ]
        models: list[list[TimedLayer]] = []
        if world:
            seeds = [replace(setting, seed=number) for number in range(len(logits))]
            models.append([TimedLayer(*of, world) for of in zip(seeds, logits, strict=True)])
            link = measured_link(world, setting.device) if self.arguments.validate else None
        if link:
            models.append([TimedLayer(setting, each, link=link) for each in logits])
        methods = [create_method(**knobs, ep_size=ranks) for knobs in study.methods]
        tokens = batch.tokens // ranks
        prefills = [TimedPrefill(each, tokens, batch.prompt) for each in models if study.layers]
        rounds = {name: getattr(self.arguments, name) for name in ("repeats", "warmup")}
        rows = time_layers([each[0] for each in models], methods, **rounds)
        whole = time_layers(prefills, methods, **rounds)
        more: dict[str, Any] = {}
        if whole:
            more["prefill"] = {"layers": study.layers, "prompt": batch.prompt, "timings": whole[0]}
        if world and link:
            check = _compared(*rows) | ({"prefill": _compared(*whole)} if whole else {})
            more["validation"] = {"note": EMULATED, "link": asdict(link), **check}
        return {
            "tokens_per_rank": tokens,
            "batch": batch.sequences,
            "prompt": batch.prompt,
            "place": batch.place,
            "routing": {**routing[0], "peak": peak_load(logits[0], shape.top_k)},
            "timings": rows[0],
            **more,
        }


def _expert_rate(layer: TimedLayer) -> float:
    """Return the operations per second of the experts of the fullest rank, dropless."""
    dropless = create_method("baseline")
    times = [layer.run(dropless)[0]["experts"] for _ in range(_PASSES + 1)][1:]
    pairs: int = layer.load(dropless)["fullest_rank"]
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
        return [layer.run(method)[0] for layer in layers]

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
        ideal_expert, ideal_rank = (
            full[name] / max(1, load[name]) for name in ("fullest_expert", "fullest_rank")
        )
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
            "load": load,
            # The fullest expert's load before over that after: N_max / max(C, …), the speedup of a
            # rank with one expert that does nothing else.
            "ideal_expert": ideal_expert,
            "ideal_rank": ideal_rank,  # the same of the fullest rank's experts together
            # The speedup's share of that gain; None if that is too small.
            "reached": (speedup.median - 1) / (ideal_rank - 1) if ideal_rank > _GAIN else None,
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
    """Yield the speedups of a file, beside the ideal ones: a line for each method of each point."""
    yield f"{study['study'] or study['place']}, {study['dtype']}, {study['machine']['name']}"
    yield study["note"] or f"measured on real processes ({study['backend']})"
    for row in study_rows(study):
        if row["phase"] == "total":
            reached = row["reached"]
            share = "" if reached is None else f", {100 * reached:.0f} % of the gain reached"
            yield (
                f"  {row['model']}, {row['ranks']} ranks, {row['part']}, {row['tokens_per_rank']} "
                f"tokens per rank, {row['label']}: {row['speedup']:.2f}× "
                f"[{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}], "
                f"ideal {row['ideal']:.2f}×{share}"
            )
