"""Forecast a run before it: cells, documents, requests, tokens, memory and time.

``capmoe-eval run experiment=table2 plan=true`` loads no weights; its times come from finished
records. ``plan=calibrate`` loads each model and times a few batches of each task.
"""

from __future__ import annotations

import dataclasses
import math
import pkgutil
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from capmoe_eval.evaluation.preparation import (
    check_backend,
    finished_record,
    load_lm,
    sandbox_for,
    with_documents,
)
from capmoe_eval.evaluation.progress import Progress, aligned, duration, truncation_line
from capmoe_eval.evaluation.run import loads
from capmoe_eval.evaluation.workload import CellWork, WorkCounter, sequences
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.record_part import Truncated
from capmoe_eval.experiment.results import Reader, directories, record_paths
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import CONTIGUOUS, calibrations, create_method

if TYPE_CHECKING:
    from capmoe_eval.evaluation.evaluate import AnyLM
    from capmoe_eval.evaluation.generation.sandbox import Sandbox
    from capmoe_eval.evaluation.tasks import TaskLibrary

_GIB = 2**30
_NUMBERS = {"cells", "documents", "requests", "tokens", "new tokens", "time"}
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")  # files of /dev where a GPU may be: CUDA, ROCm, WSL


@dataclass(frozen=True)
class Rate:
    """The seconds of a cell of one model and task here: ``fixed + each · documents``."""

    fixed: float
    each: float
    source: str  # of the two numbers, in words

    def of(self, documents: int) -> float:
        """Return the seconds of a cell with so many documents."""
        return self.fixed + self.each * documents


def forecast(plans: Sequence[CellPlan], *, calibrate: bool) -> str:
    """Return in text what a run of the plans would compute; no record is written.

    With ``calibrate`` each model is loaded, and a few batches are timed of each task of which no
    finished record tells the time. Mistakes are a UsageError, as for a run.
    """
    for plan in plans:
        check_backend(plan)
    plans = with_documents(plans)
    missing = [plan for plan in plans if plan.overwrite or finished_record(plan) is None]
    if not missing:
        return f"Missing cells: 0 of {len(plans)}. Nothing is left to compute."
    counter = WorkCounter(missing)
    sandbox, refused = sandbox_for(missing) if calibrate else (None, {})
    # Methods have the same documents, and models, too: a task's requests are made once.
    with closing(Progress()) as progress:
        for of_task in _grouped(missing, lambda plan: (plan.cell.task, plan.cell.limit)):
            for first, *_ in _grouped(of_task, loads):
                progress.stage(f"counting {first.cell.task.name} …")
                counter.work(first)
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    times: list[float | None] = []
    for of_model in _grouped(missing, loads):
        lm, works = None, []
        for cells in _grouped(of_model, lambda plan: (plan.cell.task, plan.cell.limit)):
            first = cells[0]
            work = counter.work(first)
            rate = recorded_rate(cells)
            if rate is None and calibrate and first.path not in refused:
                lm = lm or load_lm(first)
                rate = measured_rate(first, lm, counter.library, work.documents, sandbox)
            seconds = len(cells) * rate.of(work.documents) if rate else None
            rows.append(_row(cells, work, seconds, rate))
            times.append(seconds)
            works.append((first, work))
            if work.truncated:
                cut = Truncated(
                    documents=work.truncated, tokens=work.lost, max_length=work.max_length
                )
                notes.append(f"warning: {truncation_line(first.cell, work.documents, cut)}")
        weights = counter.weights(first.cell.model)
        if isinstance(weights, int):
            in_steps = first.cell.backend != "transformers"
            batch = 0 if in_steps else _largest_batch(counter, works)
            notes.append(_memory_line(first, weights, batch))
            if in_steps:
                notes.append("The memory of an engine beside its weights is not forecast.")
        else:
            name = first.cell.model.name
            notes.append(f"{name}: its tokens and its memory are not known: {weights}")
    head = (
        f"Missing cells: {len(missing)} of {len(plans)}. None was computed now; the same command "
        "without plan=… computes them."
    )
    notes += _calibration_notes(missing)
    return "\n".join([head, aligned(rows, _NUMBERS), *notes, _time_line(times)])


def _grouped(
    plans: Iterable[CellPlan], key: Callable[[CellPlan], Hashable]
) -> list[list[CellPlan]]:
    groups: dict[Hashable, list[CellPlan]] = {}
    for plan in plans:
        groups.setdefault(key(plan), []).append(plan)
    return list(groups.values())


def recorded_rate(cells: Sequence[CellPlan]) -> Rate | None:
    """Return the rate of the finished records of the cells' model and task on a device like this.

    It is the median over records with the same batch size and number of threads, or None without
    any. It has no fixed part.
    """
    first = cells[0]
    model, task = first.cell.model.name, first.cell.task.name
    places = (
        (path, root) for root in directories(first.root) for path in record_paths(root, model, task)
    )
    records = [
        record
        for record in Reader().each(places, broken=[])
        if _batches(record.cell) == _batches(first.cell)
    ]
    if not records:
        return None
    import torch

    from capmoe_eval.evaluation.loading import chosen_device
    from capmoe_eval.evaluation.provenance import described

    device = described(chosen_device(first.placement.device))
    threads = first.placement.threads or torch.get_num_threads()
    origins = [(record.provenance, record.n) for record in records]
    each = [
        origin.seconds / documents
        for origin, documents in origins
        if (origin.device, origin.threads) == (device, threads)
    ]
    return Rate(0.0, statistics.median(each), f"{len(each)} finished") if each else None


def _batches(cell: Cell) -> tuple[object, ...]:
    """Return what cells of the same rate have in common, beside task and device."""
    return cell.model, cell.backend, cell.batch_size, cell.max_num_batched_tokens


def measured_rate(
    plan: CellPlan,
    lm: AnyLM,
    library: TaskLibrary,
    documents: int,
    sandbox: Sandbox | None = None,
) -> Rate:
    """Time one and three batches of a cell of so many documents, after one to warm up.

    Programs that the model writes run in the sandbox, or not at all where that is None.
    """
    from capmoe_eval.evaluation.evaluate import evaluate

    parts = library.parts(plan.cell.task, plan.source)
    batch = max(1, math.ceil(sequences(plan) / len(parts)))  # a limit is one of each part
    most = plan.cell.limit or 3 * batch
    measured = []
    for few in (min(batch, most), min(batch, most), min(3 * batch, most)):
        cell = dataclasses.replace(plan.cell, limit=few, method=_timed(plan.cell.method))
        record = evaluate(cell, lm, library, plan.source, root=plan.root, sandbox=sandbox)
        measured.append((record.n, record.provenance.seconds))
    (n, seconds), (more, longer) = measured[1:]
    if more == n:  # these were all documents
        return Rate(0.0, longer / documents, "measured")
    each = max(0.0, longer - seconds) / (more - n)
    return Rate(max(0.0, seconds - each * n), each, "measured")


def _timed(method: Method) -> Method:
    """Return a method that takes as long, and needs no calibration."""
    if method.factor is not None and method.factor.calibration is not None:
        return method.at(1.0).canonical()
    if method.is_placed:
        knobs = method.identity() | {"placement": CONTIGUOUS}
        return create_method(knobs.pop("method"), knobs.pop("gamma", None), **knobs)
    return method if method.calibration is None else create_method("baseline")


def _calibration_notes(missing: Sequence[CellPlan]) -> list[str]:
    """Return a line for each kind of calibration that cells wait for; a run computes it first."""
    names = {name for plan in missing if (name := plan.cell.method.calibration)}
    notes = []
    for name in sorted(names):
        waiting = [plan for plan in missing if plan.cell.method.calibration == name]
        notes.append(pkgutil.resolve_name(calibrations()[name]).missing(waiting))
    return [note for note in notes if note is not None]


def _row(
    cells: Sequence[CellPlan], work: CellWork, seconds: float | None, rate: Rate | None
) -> dict[str, str]:
    counted = work.longest > 0
    n = len(cells)
    return {
        "model": cells[0].cell.model.name,
        "task": cells[0].cell.task.name,
        "cells": str(n),
        "documents": f"{n * work.documents:,}",
        "requests": f"{n * work.requests:,}",
        "tokens": f"{n * work.tokens:,}" if counted else "?",
        "new tokens": f"≤ {n * work.new_tokens:,}" if counted and work.new_tokens else "",
        "time": "?" if seconds is None else duration(seconds),
        "rate from": rate.source if rate else "",
    }


def _largest_batch(counter: WorkCounter, works: Sequence[tuple[CellPlan, CellWork]]) -> int:
    """Return the bytes of a model's largest batch; of scored ones that with most tokens counts."""
    scored = [(plan, work) for plan, work in works if work.scored]
    most = sorted(
        scored, key=lambda each: min(sequences(each[0]), each[1].requests) * each[1].longest
    )
    answers = [(plan, work) for plan, work in works if not work.scored]
    return max(counter.batch(*each) for each in most[-1:] + answers)


def _memory_line(plan: CellPlan, weights: int, batch: int) -> str:
    place, space = _memory_of(plan)
    largest = f", and about {batch / _GIB:.2f} GiB for its largest batch" if batch else ""
    fits = "" if weights + batch <= space else "; it does not fit"
    return (
        f"{plan.cell.model.name}: {weights / _GIB:.2f} GiB of weights{largest}; {place} has "
        f"{space / _GIB:.0f}{fits}"
    )


def _memory_of(plan: CellPlan) -> tuple[str, int]:
    """Return the name and the memory in bytes of what the model is loaded on."""
    here = "this machine", psutil.virtual_memory().total
    name = plan.placement.device
    if name == "cpu" or (name == "auto" and not any(any(Path("/dev").glob(g)) for g in _GPUS)):
        return here
    import torch

    from capmoe_eval.evaluation.loading import chosen_device

    device = chosen_device(name)
    if device.type != "cuda":
        return here
    devices = range(torch.cuda.device_count()) if plan.placement.device_map else [device.index or 0]
    space = sum(torch.cuda.get_device_properties(each).total_memory for each in devices)
    return f"{len(devices)} GPU" if len(devices) == 1 else f"{len(devices)} GPUs", space


def _time_line(times: Sequence[float | None]) -> str:
    timed = [seconds for seconds in times if seconds is not None]
    if not timed:
        return "No row has a time yet; plan=calibrate times a few batches of each."
    line = f"In one process: {duration(sum(timed))}, without loading models"
    if len(timed) < len(times):
        line += f", for {len(timed)} of {len(times)} rows; plan=calibrate times the others"
    return line + "."
