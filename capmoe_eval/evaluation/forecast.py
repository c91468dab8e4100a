"""Forecast a run before it: cells, documents, requests, tokens, memory and time.

``python -m capmoe_eval experiment=table2 plan=true`` loads no weights; its times come from finished
records. ``plan=calibrate`` loads each model and times a few batches of each task.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.evaluate import evaluate
from capmoe_eval.evaluation.generation.sandbox import Sandbox
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.loading import chosen_device, load_planned, reader_of, weightless
from capmoe_eval.evaluation.preparation import (
    finished_record,
    sandbox_for,
    task_library,
    with_documents,
)
from capmoe_eval.evaluation.progress import Progress, duration
from capmoe_eval.evaluation.provenance import described
from capmoe_eval.evaluation.summary import aligned
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.evaluation.workload import Workload, workload
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.configuration import Plan
from capmoe_eval.experiment.queue import loads
from capmoe_eval.experiment.results import Reader, directories, stored
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import CONTIGUOUS, create_method
from capmoe_eval.serving.calibration import DOCUMENTS, calibration_kind

_GIB = 2**30
_NUMBERS = {"cells", "documents", "requests", "tokens", "new tokens", "time"}


@dataclass(frozen=True)
class Rate:
    """The seconds of a cell of one model and task here: ``fixed + each · documents``."""

    fixed: float
    each: float
    source: str  # of the two numbers, in words

    def of(self, documents: int) -> float:
        """Return the seconds of a cell with so many documents."""
        return self.fixed + self.each * documents


@dataclass(frozen=True)
class Memory:
    """The bytes that a model needs."""

    weights: int
    batch: int  # of its largest batch: logits, and keys and values; activations come on top


def forecast(plans: Sequence[Plan], *, calibrate: bool) -> str:
    """Return in text what a run of the plans would compute; no record is written.

    With ``calibrate`` each model is loaded, and a few batches are timed of each task of which no
    finished record tells the time. Mistakes are a UsageError, as for a run.
    """
    plans = with_documents(plans)
    missing = [plan for plan in plans if plan.overwrite or finished_record(plan) is None]
    if not missing:
        return f"All {len(plans)} cells are finished."
    library, progress = task_library(missing), Progress(len(missing))
    sandbox, refused = sandbox_for(missing) if calibrate else (None, {})
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    times: list[float | None] = []
    for of_model in _grouped(missing, loads):
        first = of_model[0]
        model = first.cell.model
        progress.loading(model.name)
        reader, lm, works = None, None, []
        try:
            reader = reader_of(model)
        except UsageError as error:
            notes.append(f"{model.name}: its tokens and its memory are not known: {error}")
        for cells in _grouped(of_model, lambda plan: (plan.cell.task, plan.cell.limit)):
            # Methods have the same documents.
            work = workload(cells[0].cell, library, cells[0].source, reader)
            rate = recorded_rate(cells)
            if rate is None and calibrate and cells[0].path not in refused:
                lm = lm or load_planned(first)
                rate = measured_rate(cells[0], lm, library, work.documents, sandbox)
            seconds = len(cells) * rate.of(work.documents) if rate else None
            rows.append(_row(cells, work, seconds, rate))
            times.append(seconds)
            works.append((_sequences(cells[0]), work))
        if reader is not None:
            notes.append(_memory_line(first, needed_memory(model, works)))
    head = f"{len(missing)} of {len(plans)} cells are missing; none was computed now."
    notes += _calibration_notes(missing)
    return "\n".join([head, aligned(rows, _NUMBERS), *notes, _time_line(times)])


def _grouped(plans: Iterable[Plan], key: Callable[[Plan], Hashable]) -> list[list[Plan]]:
    groups: dict[Hashable, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(key(plan), []).append(plan)
    return list(groups.values())


def recorded_rate(cells: Sequence[Plan]) -> Rate | None:
    """Return the rate of the finished records of the cells' model and task on a device like this.

    It is the median over records with the same batch size and number of threads, or None without
    any. It has no fixed part.
    """
    first = cells[0]
    device = described(chosen_device(first.placement.device))
    threads = first.placement.threads or torch.get_num_threads()
    task = first.path.parent.relative_to(first.root)
    places = (
        (path, root)
        for root in directories(first.root)
        for path in sorted((root / task).glob("*.json"))
    )
    each = [
        record.provenance.seconds / record.n
        for record in Reader().each(places, broken=[])
        if record.cell.batch_size == first.cell.batch_size
        and record.cell.model == first.cell.model
        and record.provenance.device == device
        and record.provenance.threads == threads
    ]
    return Rate(0.0, statistics.median(each), f"{len(each)} finished") if each else None


def measured_rate(
    plan: Plan, lm: CapmoeLM, library: TaskLibrary, documents: int, sandbox: Sandbox | None = None
) -> Rate:
    """Time one and three batches of a cell of so many documents, after one to warm up.

    Programs that the model writes run in the sandbox, or not at all where that is None.
    """
    parts = len(library.get(plan.cell.task.lm_eval, plan.source, plan.cell.task.dataset)["tasks"])
    limit = max(1, math.ceil(_sequences(plan) / parts))  # a limit is one of each part
    measured = []
    for few in (limit, limit, 3 * limit):
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


def _calibration_notes(missing: Sequence[Plan]) -> list[str]:
    """Return a line for each kind of calibration that cells wait for; a run computes it first."""
    lines = []
    for name in sorted({plan.cell.method.calibration or "" for plan in missing} - {""}):
        kind = calibration_kind(name)
        waiting = [plan for plan in missing if plan.cell.method.calibration == name]
        paths = {(plan.root, kind.path_of(plan.root, plan.cell)) for plan in waiting}
        if absent := sum(stored(root, path) is None for root, path in paths):
            lines.append(
                f"{kind.asked_by}: {len(waiting)} cells need {len(paths)} calibrations, {absent} "
                f"of them missing: {DOCUMENTS} other documents each, which are not counted here."
            )
    return lines


def _sequences(plan: Plan) -> int:
    """Return the sequences of a batch; 1 where lm-eval is to find how many fit."""
    size = str(plan.cell.batch_size)
    return int(size) if size.isdecimal() else 1


def needed_memory(model: ModelId, works: Iterable[tuple[int, Workload]]) -> Memory:
    """Return the memory of a model, which is not loaded, and of its largest batch.

    ``works`` has the batch size and the work of each task.
    """
    built = weightless(model)
    weights = sum(each.numel() * each.element_size() for each in built.parameters())
    config = built.config.get_text_config()
    size = next(built.parameters()).element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * size
    # lm-eval takes the logarithm of the softmax of all logits beside the logits themselves.
    logits = 2 * config.vocab_size * size
    batches = [b * (work.scored * logits + work.longest * cache) for b, work in works]
    return Memory(weights, max(batches, default=0))


def _row(
    cells: Sequence[Plan], work: Workload, seconds: float | None, rate: Rate | None
) -> dict[str, str]:
    known = work.longest > 0
    n = len(cells)
    return {
        "model": cells[0].cell.model.name,
        "task": cells[0].cell.task.name,
        "cells": str(n),
        "documents": f"{n * work.documents:,}",
        "requests": f"{n * work.requests:,}",
        "tokens": f"{n * work.tokens:,}" if known else "?",
        "new tokens": f"≤ {n * work.new_tokens:,}" if known and work.new_tokens else "",
        "time": "?" if seconds is None else duration(seconds),
        "rate from": rate.source if rate else "",
    }


def _memory_line(plan: Plan, memory: Memory) -> str:
    needed = memory.weights + memory.batch
    place, there = _room(plan)
    fits = "" if needed <= there else "; it does not fit"
    return (
        f"{plan.cell.model.name}: {memory.weights / _GIB:.2f} GiB of weights, and at least "
        f"{memory.batch / _GIB:.2f} GiB for its largest batch; {place} has {there / _GIB:.0f}{fits}"
    )


def _room(plan: Plan) -> tuple[str, int]:
    """Return the name and the memory in bytes of what the model is loaded on."""
    device = chosen_device(plan.placement.device)
    if device.type != "cuda":
        return "this machine", psutil.virtual_memory().total
    devices = range(torch.cuda.device_count()) if plan.placement.device_map else [device.index or 0]
    room = sum(torch.cuda.get_device_properties(each).total_memory for each in devices)
    return f"{len(devices)} GPU" if len(devices) == 1 else f"{len(devices)} GPUs", room


def _time_line(times: Sequence[float | None]) -> str:
    known = [seconds for seconds in times if seconds is not None]
    line = f"In one process: {duration(sum(known))}, without loading models"
    if len(known) < len(times):
        line += f", for {len(known)} of {len(times)} rows; plan=calibrate times the others"
    return line + "."
