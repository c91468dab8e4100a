"""Forecast a run before it: cells, documents, time, and the memory of weights.

``capmoe-eval run experiment=table2 plan=true`` loads no weights; its times come from finished
records. ``plan=calibrate`` loads each model and times a few batches of each task.
"""

from __future__ import annotations

import dataclasses
import math
import pkgutil
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.preparation import (
    check_backend,
    finished_record,
    load_lm,
    n_documents,
    sandbox_for,
    task_library,
    with_documents,
)
from capmoe_eval.evaluation.progress import aligned, duration
from capmoe_eval.evaluation.run import loads
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.results import directories, each_record, record_paths
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import CONTIGUOUS, calibrations, create_method

if TYPE_CHECKING:
    from capmoe_eval.evaluation.evaluate import AnyLM
    from capmoe_eval.evaluation.generation.sandbox import Sandbox
    from capmoe_eval.evaluation.tasks import TaskLibrary

_GIB = 2**30
_NUMBERS = {"cells", "documents", "time"}


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
    library = task_library(missing)
    sandbox, refused = sandbox_for(missing) if calibrate else (None, {})
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    times: list[float | None] = []
    for of_model in _grouped(missing, loads):
        lm = None
        for cells in _grouped(of_model, lambda plan: (plan.cell.task, plan.cell.limit)):
            first = cells[0]
            cell = first.cell
            documents = n_documents(library.parts(cell.task, first.source).values(), cell.limit)
            rate = recorded_rate(cells)
            if rate is None and calibrate and first.path not in refused:
                lm = lm or load_lm(first)
                rate = measured_rate(first, lm, library, documents, sandbox)
            seconds = len(cells) * rate.of(documents) if rate else None
            times.append(seconds)
            rows.append(
                {
                    "model": cell.model.name,
                    "task": cell.task.name,
                    "cells": str(len(cells)),
                    "documents": f"{len(cells) * documents:,}",
                    "time": "?" if seconds is None else duration(seconds),
                    "rate from": rate.source if rate else "",
                }
            )
        notes.append(_memory_line(of_model[0]))
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
        for record in each_record(places, broken=[])
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
    size = plan.cell.batch_size
    rows = 1 if size == "auto" else size
    batch = max(1, math.ceil(rows / len(parts)))  # a limit is one of each part
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


def _memory_line(plan: CellPlan) -> str:
    from capmoe_eval.evaluation.loading import weightless

    model = plan.cell.model
    try:
        parameters = list(weightless(model).parameters())
    except UsageError as error:
        return f"{model.name}: its memory is not known: {error}"
    weights = sum(weight.numel() * weight.element_size() for weight in parameters)
    place, space = _memory_of(plan)
    fits = "" if weights <= space else "; it does not fit"
    return (
        f"{model.name}: {weights / _GIB:.2f} GiB of weights, without batches; {place} has "
        f"{space / _GIB:.0f}{fits}"
    )


def _memory_of(plan: CellPlan) -> tuple[str, int]:
    """Return the name and the memory in bytes of what the model is loaded on."""
    import torch

    from capmoe_eval.evaluation.loading import chosen_device

    device = chosen_device(plan.placement.device)
    if device.type != "cuda":
        return "this machine", psutil.virtual_memory().total
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
