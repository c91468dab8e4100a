"""Compute cells: finished cells are skipped, and a failed cell does not stop the others."""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capmoe_eval.errors import UnwritableError, UsageError, unwritable
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.experiment import inputs
from capmoe_eval.experiment.configuration import Plan
from capmoe_eval.experiment.files import check_writable, remove_strays
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.record import Record, read_record

if TYPE_CHECKING:
    from capmoe_eval.evaluation.tasks import TaskLibrary


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of the disk, which every further cell would have as well."""


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        records: The records of all finished cells, in the order of the plans.
        computed: Number of cells that this run computed.
        failures: (cell, reason) of each cell that failed.
    """

    records: list[Record] = field(default_factory=list)
    computed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


def run(plans: Sequence[Plan], progress: Progress | None = None) -> Outcome:
    """Compute every planned cell whose record is missing.

    Everything that can be checked without a model is checked first, so that a long run does not
    stop half-way because of a typing error. Cells of one model run together, and each model is
    loaded once.

    Args:
        plans: The cells and their settings.
        progress: The display; a new one on standard error by default.

    Returns:
        The records of all finished cells, and the failures.

    Raises:
        UsageError: For an unwritable results directory, a file there that is not a whole record, a
            dataset that is not in ``data.root``, or a mistake that concerns all cells, such as a
            model that cannot be loaded. Nothing was computed.
        UnwritableError: Also if the disk is full in the middle of a run, which then stops.
    """
    for plan in plans:
        _check_processes(plan)
    from capmoe_eval.evaluation.tasks import ready

    sources = {source: ready(source) for source in {plan.source for plan in plans}}
    plans = [dataclasses.replace(plan, source=sources[plan.source]) for plan in plans]
    finished = {plan.path: _finished(plan) for plan in plans}
    missing = [plan for plan in plans if finished[plan.path] is None]
    for root in sorted({plan.root for plan in missing}):
        check_writable("results_dir", root)
        remove_strays(sorted({plan.path.parent for plan in missing if plan.root == root}))
        inputs.prepare(root)
    outcome = Outcome()
    if missing:
        library = _documents(missing)
        progress = progress or Progress(len(missing), io.StringIO() if process_rank() else None)
        done = [record for record in finished.values() if record is not None]
        finished |= {r.path: r for r in _compute(missing, done, library, progress, outcome)}
    outcome.records = [record for plan in plans if (record := finished[plan.path]) is not None]
    return outcome


def _check_processes(plan: Plan) -> None:
    """Check that ``parallel=ep`` has one process per rank of the cell.

    Raises:
        UsageError: If it has not, or a ``device_map`` is set.
    """
    if plan.parallel != "ep":
        return
    ranks, started = plan.cell.method.ep_size, process_count()
    if started is None:
        raise UsageError(
            "parallel=ep: needs one process per rank; start them with torchrun --nproc-per-node "
            f"{ranks} -m capmoe_eval … parallel=ep ep_size={ranks}"
        )
    if plan.cell.method.uses_ranks and ranks != started:
        raise UsageError(
            f"ep_size={ranks}: torchrun started {started} processes, and under parallel=ep each is "
            f"a rank; set ep_size={started}, or start {ranks}"
        )
    if plan.device_map is not None:
        raise UsageError(
            f"device_map={plan.device_map}: under parallel=ep every process has one device; set "
            "device_map=null"
        )


def _finished(plan: Plan) -> Record | None:
    """Return the cell's record, or None if it is to be computed.

    Raises:
        UsageError: If the record is damaged, or was computed from other documents.
    """
    fingerprint = plan.source.fingerprint(plan.cell.task.dataset)
    if plan.overwrite or not plan.path.exists():
        return None
    record = read_record(plan.path, plan.root)
    recorded = record.provenance.data_fingerprint
    if fingerprint is not None and recorded != fingerprint:  # None: the hub's is not known yet
        raise UsageError(
            f"{plan.path}: computed from other documents (fingerprint {recorded}, now "
            f"{fingerprint}); name the new ones with data.name=NAME, choose another results_dir, "
            "or delete the old results"
        )
    return record


def _documents(plans: Sequence[Plan]) -> TaskLibrary:
    """Return a library with the tasks of the missing cells, checked before a model is loaded.

    Raises:
        UsageError: If a task or its documents cannot be read, or differ from those of the results.
    """
    from capmoe_eval.evaluation.loading import quiet_libraries
    from capmoe_eval.evaluation.tasks import TaskLibrary

    quiet_libraries()
    library = TaskLibrary()
    for plan in {(p.root, p.source, p.cell.task): p for p in plans}.values():
        library.check_metric(plan.cell.task, plan.source)
        fingerprint = library.fingerprint(plan.cell.task, plan.source)
        inputs.check(plan.root, plan.cell, {"data_fingerprint": fingerprint})
    return library


def _compute(
    plans: Sequence[Plan],
    finished: Sequence[Record],
    library: TaskLibrary,
    progress: Progress,
    outcome: Outcome,
) -> Iterator[Record]:
    """Compute cells model by model, and yield the record of each after it is written.

    Args:
        plans: The missing cells.
        finished: The records of the other cells.
        library: The tasks.
        progress: The display.
        outcome: Receives counts and failures.
    """
    import torch

    own_threads = torch.get_num_threads()

    def key(plan: Plan) -> tuple[object, ...]:
        return (plan.cell.model, plan.device, plan.device_map, plan.parallel, plan.threads)

    order: dict[tuple[object, ...], int] = {}
    for plan in plans:
        order.setdefault(key(plan), len(order))
    by_model = sorted(plans, key=lambda plan: order[key(plan)])
    for _, group in itertools.groupby(by_model, key=key):
        torch.set_num_threads(own_threads)  # the model before may have changed it
        progress.loading((cells := list(group))[0].cell.model.name)
        yield from _of_one_model(cells, by_model, library, finished, progress, outcome)
        gc.collect()  # only reference cycles still hold the model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    torch.set_num_threads(own_threads)


def _of_one_model(
    cells: Sequence[Plan],
    plans: Sequence[Plan],
    library: TaskLibrary,
    finished: Sequence[Record],
    progress: Progress,
    outcome: Outcome,
) -> Iterator[Record]:
    """Compute the cells of one model, and yield the record of each; then release the model.

    Args:
        cells: The missing cells of the model.
        plans: The missing cells of all models.
        library: The tasks.
        finished: The records of cells that were finished before.
        progress: The display.
        outcome: Receives counts and failures.
    """
    from capmoe_eval.evaluation.evaluate import evaluate
    from capmoe_eval.evaluation.loading import Placement, load_lm
    from capmoe_eval.evaluation.provenance import provenance

    first = cells[0]
    lm = None
    for plan in cells:
        try:
            documents = {"data_fingerprint": library.fingerprint(plan.cell.task, plan.source)}
            if lm is None:
                placement = Placement(first.device, first.device_map, first.threads, first.parallel)
                loaded = load_lm(first.cell.model, placement, batch_size=1)
                origin = provenance(loaded.model, loaded.tokenizer)
                warning = inputs.check(plan.root, plan.cell, origin | documents, finished)
                if warning is not None:
                    progress.warn(warning)
                loaded.agree("the cells to compute", "\n".join(str(p.path) for p in plans))
                lm = loaded
                lm.on_rows = progress.rows
            else:
                inputs.check(plan.root, plan.cell, origin | documents)
            progress.start(plan.cell)
            record = evaluate(plan.cell, lm, library, plan.source, root=plan.root)
            if not process_rank():
                inputs.note(record, plan.root)
                record.write()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise unwritable("results_dir", plan.root, error) from error
            if (
                isinstance(error, UnwritableError)  # no further cell could be written either
                or os.environ.get("CAPMOE_DEBUG")
                or _hopeless(error, plans, lm is not None, outcome)
                or (plan.parallel == "ep" and not (isinstance(error, UsageError) and lm))
            ):
                raise  # under parallel=ep the other processes wait for this one: end them all
            reason = _one_line(error)
            progress.fail(plan.cell, reason)
            outcome.failures.append((str(plan.cell), reason))
            if lm is None:
                _fail_rest(cells[cells.index(plan) + 1 :], reason, progress, outcome)
                break
            continue
        outcome.computed += 1
        progress.finish(record)
        yield record


def _hopeless(error: Exception, plans: Sequence[Plan], loaded: bool, outcome: Outcome) -> bool:
    """Return whether a mistake concerns all planned cells, so that the run should stop."""
    models = {plan.cell.model for plan in plans}
    methods = {plan.cell.method for plan in plans}
    alike = len(models) == 1 and (len(methods) == 1 or not loaded)
    return isinstance(error, UsageError) and alike and not outcome.computed


def _fail_rest(cells: Sequence[Plan], reason: str, progress: Progress, outcome: Outcome) -> None:
    """Report the remaining cells of a model that cannot be loaded as failed."""
    for plan in cells:
        progress.fail(plan.cell, reason)
        outcome.failures.append((str(plan.cell), reason))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"[:500]
