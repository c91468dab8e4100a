"""Calibrate: run the stock model on documents that are not evaluated, and measure its layers."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.evaluation import calibration_file
from capmoe_eval.evaluation.calibration_file import Applied, Calibration, kind_of
from capmoe_eval.evaluation.evaluate import requests
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.provenance import provenance
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, TaskId
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.names import split_world
from capmoe_eval.experiment.reservations import hold, print_warning
from capmoe_eval.experiment.results import stored
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.wrapper.ranks import ranks_in
from capmoe_eval.zoo.hub import embedded_hub
from capmoe_eval.zoo.sets import WORLDS


def apply_calibration(
    plan: CellPlan, lm: CapmoeLM, warn: Callable[[str], None] = print_warning
) -> Applied | None:
    """Return a cell's method after its calibration; None if it needs none.

    The calibration is read, also that of the shipped results, or computed and written where there
    is none yet. Of several processes with one model all compute, and the first writes; others wait
    for its file, and ``warn`` is told so.

    Raises:
        UsageError: If the task has no documents beside those that are evaluated, or the file is not
            the cell's calibration.
    """
    cell, kind = plan.cell, kind_of(plan.cell.method)
    if kind is None:
        return None
    path = kind.path_of(plan.root, cell)
    worlds: list[Any] = ranks_in(lm.model)
    first = not worlds or worlds[0].rank == 0
    weights = provenance(lm.model, lm.reader)["model"]["weights"]
    with ExitStack() as reservation:
        if first:
            with writing("results_dir", plan.root):
                reservation.enter_context(hold(path, warn))
        place = stored(plan.root, path) if first else None
        measured = None if place is None else kind.read(place[0], cell, weights)
        measured = worlds[0].tell(measured) if worlds else measured
        if measured is None:
            measured = calibrate(kind, cell, lm, plan.source, weights)
            if first:
                measured.write(path)
    return measured.applied(cell.method, path.relative_to(plan.root).as_posix())


def calibrate(
    kind: type[Calibration], cell: Cell, lm: CapmoeLM, source: DataSource, weights: str
) -> Calibration:
    """Run the stock model on other documents than the cell's, and return what it measured.

    They have the cell's prompts, batches and capacity groups. ``weights`` is the hash of the
    model's.

    Raises:
        UsageError: If there are no other documents.
    """
    parts, split = other_documents(cell.task, source, kind.asked_by)
    per_part = math.ceil(calibration_file.DOCUMENTS / len(parts))
    asked = sorted(requests(parts, cell, per_part), key=attrgetter("request_type"))
    lm.set_batches(cell.batch_size, cell.shuffle)
    # Not in its canonical form, the baseline, which has no capacity groups.
    knobs = {knob: getattr(cell.method, knob) for knob in kind.knobs}
    meter = lm.route(TokenDrop(gamma=math.inf, **knobs))
    try:
        observer = kind.observer(meter.layers, cell.method)
        meter.observe(observer)
        for request_type, alike in itertools.groupby(asked, attrgetter("request_type")):
            getattr(lm, request_type)(list(alike))
    finally:
        lm.release()
    prompts = "\n".join(str(request.args[0]) for request in asked)
    return kind(
        of=kind.identity_of(cell),
        split=split,
        documents=len({(request.task_name, request.doc_id) for request in asked}),
        prompts=hashlib.sha256(prompts.encode()).hexdigest()[:16],
        tokens=meter.summary()["tokens"],
        forwards=meter.forwards,
        weights=weights,
        **kind.measured(observer, meter.report()["layers"]),
    )


@functools.lru_cache(maxsize=16)
def other_documents(task: TaskId, source: DataSource, asked_by: str) -> tuple[dict[str, Any], str]:
    """Return a task over documents that it does not evaluate, and the name of their split.

    ``asked_by`` is the setting that needs them, for the message where there are none.
    """
    library = TaskLibrary()
    if split_world(source.name)[0] in WORLDS:
        dev = DataSource(source.name, embedded_hub(source.name, "dev"))
        return library.parts(task, dev), "dev"
    parts = library.parts(task, source)
    splits = set()
    for part in parts.values():
        names = [part.get_config(f"{kind}_split") for kind in ("test", "validation", "training")]
        evaluated, *others = [name for name in names if name is not None]
        before = part.eval_docs
        other = next((name for name in others if name != evaluated), None)
        if other is not None:
            part.set_config("test_split", other)
        if other is None or part.eval_docs is before:
            raise UsageError(
                f"{asked_by}: {task.name} has no documents beside those that it evaluates, "
                "and a calibration must not see these; choose a task with train or validation data"
            )
        splits.add(other)
    return parts, "+".join(sorted(splits))
