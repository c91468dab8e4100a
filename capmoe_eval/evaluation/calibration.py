"""Calibrate: run the stock model on documents that are not evaluated, and note its loads by γ."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from contextlib import nullcontext
from typing import Any

from filelock import FileLock
from lm_eval.evaluator_utils import get_sample_size

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.evaluation.evaluate import prepare
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.provenance import provenance
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, TaskId
from capmoe_eval.experiment.configuration import Plan
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.adaptive import grid
from capmoe_eval.serving.calibration import (
    DOCUMENTS,
    Adapted,
    Calibration,
    LayerCurve,
    adapted,
    calibration_identity,
    calibration_path,
    read_calibration,
    write_calibration,
)
from capmoe_eval.wrapper.curve_meter import CurveMeter
from capmoe_eval.wrapper.ranks import ranks_in
from capmoe_eval.zoo.miniworld.evaluation import miniworld_hub
from capmoe_eval.zoo.pictures.evaluation import pictures_hub

_DEV = {"miniworld": miniworld_hub, "pictures": pictures_hub}


def adapt(plan: Plan, lm: CapmoeLM) -> Adapted | None:
    """Return a cell's method with the γ of each layer; None if its γ is not adaptive.

    The calibration is read, or computed and written where there is none yet. Of several processes
    with one model all compute, and the first writes.

    Raises:
        UsageError: If the task has no documents beside those that are evaluated, or the file is not
            the cell's calibration.
    """
    cell, path = plan.cell, calibration_path(plan.root, plan.cell)
    if cell.method.budget is None:
        return None
    worlds: list[Any] = ranks_in(lm.model)
    first = not worlds or worlds[0].rank == 0
    weights = provenance(lm.model, lm.reader)["model"]["weights"]
    if first:
        with writing("results_dir", plan.root):
            path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")) if first else nullcontext():
        found = read_calibration(path, cell, weights) if first and path.exists() else None
        found = worlds[0].tell(found) if worlds else found
        if found is None:
            found = calibrate(cell, lm, plan.source, weights)
            if first:
                write_calibration(path, found)
    return adapted(cell.method, found, path.relative_to(plan.root).as_posix())


def calibrate(
    cell: Cell, lm: CapmoeLM, source: DataSource, weights: str, *, evaluated: bool = False
) -> Calibration:
    """Run the stock model on other documents than the cell's, and return its layers by γ.

    They have the cell's prompts, batches and capacity groups.

    Args:
        cell: The cell.
        lm: Its model.
        source: Source of the documents, in place.
        weights: The hash of the model's weights.
        evaluated: Take the documents that the cell evaluates instead, as many as its limit says: a
            test of a calibration, and no calibration.

    Raises:
        UsageError: If there are no other documents.
    """
    if evaluated:
        tasks, split = TaskLibrary().get(cell.task.lm_eval, source, cell.task.dataset), "evaluated"
    else:
        tasks, split = _other_documents(cell.task, source)
    prepare(tasks, cell)
    lm.set_batches(cell.batch_size, cell.shuffle)
    per_part = math.ceil(DOCUMENTS / len(tasks["tasks"]))
    requests: dict[str, list[Any]] = {}
    documents = 0
    for task in tasks["tasks"].values():
        limit = get_sample_size(task, cell.limit if evaluated else per_part)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        documents += len({request.doc_id for request in task.instances})
        for request in task.instances:
            requests.setdefault(request.request_type, []).append(request)
    meter = lm.route(_unlimited(cell.method))
    try:
        layers = [of_layer.layer for of_layer in meter.layers]
        gammas = grid(_never_binds(cell.method, max(of.n_experts / of.top_k for of in layers)))
        curves = meter.recorder = CurveMeter(layers, cell.method, gammas)
        for kind, asked in sorted(requests.items()):
            getattr(lm, kind)(asked)
    finally:
        lm.release()
    prompts = "\n".join(str(one.args[0]) for kind in sorted(requests) for one in requests[kind])
    return Calibration(
        of=calibration_identity(cell),
        split=split,
        documents=documents,
        prompts=hashlib.sha256(prompts.encode()).hexdigest()[:16],
        tokens=meter.summary()["tokens"],
        forwards=meter.forwards,
        weights=weights,
        gammas=list(gammas),
        layers=[
            LayerCurve(
                name=curve.name,
                dropped=_shares(curve.dropped_X),
                dropped_scores=_shares(curve.dropped_scores_X),
                straggler=[round(value, 6) for value in curve.straggler_X],
            )
            for curve in curves.curves()
        ],
    )


def _shares(values: list[float]) -> list[float]:
    """Return shares without the digits in which a sum's order shows."""
    return [min(max(round(value, 6), 0.0), 1.0) for value in values]


def _unlimited(method: Method) -> Method:
    """Return a method with the same capacity groups that drops nothing."""
    return dataclasses.replace(method, name="score", modality="uniform").at(math.inf)


def _never_binds(method: Method, top: float) -> float:
    """Return a γ at which no capacity binds: E/K of an expert's, R of a device's."""
    return float(method.ep_size) if method.granularity == "device" else top


@functools.lru_cache(maxsize=16)
def _other_documents(task: TaskId, source: DataSource) -> tuple[dict[str, Any], str]:
    """Return a task over documents that it does not evaluate, and the name of their split."""
    library = TaskLibrary()
    if source.name in _DEV:
        dev = DataSource(source.name, _DEV[source.name]("dev"))
        return library.get(task.lm_eval, dev, task.dataset), "dev"
    tasks = library.get(task.lm_eval, source, task.dataset)
    splits = set()
    for part in tasks["tasks"].values():
        names = [part.get_config(f"{kind}_split") for kind in ("test", "validation", "training")]
        evaluated, *others = [name for name in names if name is not None]
        before = part.eval_docs
        other = next((name for name in others if name != evaluated), None)
        if other is not None:
            part.set_config("test_split", other)
        if other is None or part.eval_docs is before:
            raise UsageError(
                f"gamma=adaptive: {task.name} has no documents beside those that it evaluates, "
                "and a calibration must not see these; choose a task with train or validation data"
            )
        splits.add(other)
    return tasks, "+".join(sorted(splits))
