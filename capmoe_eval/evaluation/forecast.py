"""Forecast a run before it: cells, documents, time, and the memory of weights.

``capmoe-eval run experiment=table2 plan=true`` loads no weights, and writes no record.
"""

from __future__ import annotations

import pkgutil
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from operator import attrgetter

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.progress import aligned, duration
from capmoe_eval.evaluation.run import (
    check_backend,
    finished_record,
    loads,
    n_documents,
    refusals,
    task_library,
    with_documents,
)
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.results import read_results
from capmoe_eval.lazy import torch
from capmoe_eval.routing.registry import calibrations

_NUMBERS = {"cells", "documents", "time"}
# What cells of the same rate have in common, beside task and device.
_batches = attrgetter("model", "backend", "batch_size", "max_num_batched_tokens")


def forecast(plans: Sequence[CellPlan]) -> str:
    """Return in text what a run of the plans would compute; mistakes are a UsageError, as there."""
    for plan in plans:
        check_backend(plan)
    plans = with_documents(plans)
    missing = [plan for plan in plans if plan.overwrite or finished_record(plan) is None]
    if not missing:
        return f"Missing cells: 0 of {len(plans)}. Nothing is left to compute."
    head = (
        f"Missing cells: {len(missing)} of {len(plans)}. None was computed now; the same command "
        "without plan=true computes them."
    )
    refused = refusals(missing, asks_hub=False)
    missing = [plan for plan in missing if plan.path not in refused]
    library = task_library(missing)
    from capmoe_eval.evaluation.evaluate import check_cell  # which imports torch
    from capmoe_eval.evaluation.loading import weightless

    def check_task(plan: CellPlan) -> None:
        check_cell(library.parts(plan.cell.task, plan.source), plan.cell)

    refused |= refusals(missing, check_task)
    missing = [plan for plan in missing if plan.path not in refused]
    rows: list[dict[str, str]] = []
    reasons = Counter(" ".join(str(error).split()) for error in refused.values())
    notes = [f"{n} of these cells cannot be computed: {reason}" for reason, n in reasons.items()]
    times: list[float] = []
    groups: dict[Hashable, list[CellPlan]] = {}
    for plan in missing:
        groups.setdefault((loads(plan), plan.cell.task, plan.cell.limit), []).append(plan)
    for cells in groups.values():
        first = cells[0]
        parts = library.parts(first.cell.task, first.source).values()
        documents = len(cells) * n_documents(parts, first.cell.limit)
        seconds = recorded_seconds(first)
        times += [documents * statistics.median(seconds)] if seconds else []
        row = {
            "model": first.cell.model.name,
            "task": first.cell.task.name,
            "cells": str(len(cells)),
            "documents": f"{documents:,}",
            "time": duration(times[-1]) if seconds else "?",
            "from records": str(len(seconds)),
        }
        rows.append(row)
    for model in dict.fromkeys(plan.cell.model for plan in missing):
        try:
            weights = weightless(model).parameters()
            gib = sum(weight.numel() * weight.element_size() for weight in weights) / 2**30
            notes.append(f"{model.name}: {gib:.2f} GiB of weights, without batches")
        except UsageError as error:
            notes.append(f"{model.name}: its memory is not known: {error}")
    for name in sorted({name for plan in missing if (name := plan.cell.method.calibration)}):
        waiting = [plan for plan in missing if plan.cell.method.calibration == name]
        note = pkgutil.resolve_name(calibrations()[name]).missing(waiting)
        notes += [] if note is None else [note]
    end = f"In one process: {duration(sum(times))}, without loading models"
    if len(times) < len(rows):
        end = f"{end}, for {len(times)} of {len(rows)} rows" if times else "The time is not known"
        end += "; a cell of few documents (limit=N) in the same results_dir gives a row its time"
    return "\n".join([head, aligned(rows, _NUMBERS), *notes, f"{end}."])


def recorded_seconds(plan: CellPlan) -> list[float]:
    """Return the seconds a document of the finished records of a cell's model and task.

    They are of records with the same batch size, on a device and with threads like those here.
    """
    from capmoe_eval.evaluation.loading import chosen_device
    from capmoe_eval.evaluation.provenance import described

    device = described(chosen_device(plan.device))
    threads = plan.threads or torch.get_num_threads()
    model, task = plan.cell.model.name, plan.cell.task.name
    return [
        record.provenance.seconds / record.n
        for record in read_results(plan.root, [], model, task)
        if _batches(record.cell) == _batches(plan.cell)
        and (record.provenance.device, record.provenance.threads) == (device, threads)
    ]
