"""Compute missing cells, model by model; a failed cell does not stop the others."""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from capmoe_eval.errors import UnwritableError, UsageError, unwritable
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.summary import rounding_warning
from capmoe_eval.experiment import inputs
from capmoe_eval.experiment.configuration import Plan
from capmoe_eval.experiment.files import check_writable, remove_strays
from capmoe_eval.experiment.processes import process_count, process_rank
from capmoe_eval.experiment.record import Record, read_record

if TYPE_CHECKING:
    from capmoe_eval.evaluation.generation.sandbox import Sandbox
    from capmoe_eval.evaluation.lm import CapmoeLM
    from capmoe_eval.evaluation.tasks import TaskLibrary


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of the disk, which every further cell would have as well."""


@dataclass
class Outcome:
    """The result of a run."""

    records: list[Record] = field(default_factory=list)  # of all finished cells, as planned
    computed: int = 0  # cells that this run computed
    failures: list[tuple[str, str]] = field(default_factory=list)  # (cell, reason)


def run(plans: Sequence[Plan], progress: Progress | None = None) -> Outcome:
    """Compute every planned cell whose record is missing.

    Everything that can be checked without a model is checked first, so that a long run does not
    stop half-way because of a typing error. Cells of one model run together, and each model is
    loaded once.

    Args:
        plans: The cells and their settings.
        progress: The display; a new one on standard error by default.

    Raises:
        UsageError: For an unwritable results directory, a file there that is not a whole record, a
            dataset that is not in ``data.root``, or a mistake that concerns all cells, such as a
            model that cannot be loaded. Nothing was computed.
        UnwritableError: Also if the disk is full in the middle of a run, which then stops.
    """
    for plan in plans:
        _check_processes(plan)
    plans = _with_documents(plans)
    finished = {plan.path: _finished(plan) for plan in plans}
    missing = [plan for plan in plans if finished[plan.path] is None]
    for root in sorted({plan.root for plan in missing}):
        check_writable("results_dir", root)
        remove_strays(sorted({plan.path.parent for plan in missing if plan.root == root}))
        inputs.prepare(root)
    outcome = Outcome()
    if missing:
        library = _documents(missing)
        sandbox, refused = _sandbox(missing, library)
        if len(refused) == len(missing):
            raise next(iter(refused.values()))
        progress = progress or Progress(len(missing), io.StringIO() if process_rank() else None)
        for plan in missing:
            if plan.path in refused:
                progress.fail(plan.cell, str(refused[plan.path]))
                outcome.failures.append((str(plan.cell), str(refused[plan.path])))
        missing = [plan for plan in missing if plan.path not in refused]
        done = [record for record in finished.values() if record is not None]
        finished |= {
            r.path: r for r in _compute(missing, done, library, sandbox, progress, outcome)
        }
    outcome.records = [record for plan in plans if (record := finished[plan.path]) is not None]
    return outcome


def forecast(plans: Sequence[Plan], *, calibrate: bool) -> str:
    """Return in text what a run would compute: cells, documents, tokens, memory and time.

    Args:
        plans: The cells and their settings.
        calibrate: Whether to load the models and time a few batches.

    Raises:
        UsageError: As for :func:`run`.
    """
    plans = _with_documents(plans)
    missing = [plan for plan in plans if _finished(plan) is None]
    if not missing:
        return f"All {len(plans)} cells are finished."
    from capmoe_eval.evaluation import forecast

    library, progress = _documents(missing), Progress(len(missing))
    if not calibrate:
        return forecast.forecast(plans, missing, library, progress)
    sandbox, refused = _sandbox(missing, library)

    def measured(plan: Plan, lm: CapmoeLM, documents: int) -> forecast.Rate | None:
        if plan.path in refused:
            return None
        return forecast.measured_rate(plan, lm, library, documents, sandbox)

    return forecast.forecast(plans, missing, library, progress, measured)


def _with_documents(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans with their documents in place."""
    from capmoe_eval.evaluation.tasks import ready

    sources = {source: ready(source) for source in {plan.source for plan in plans}}
    return [dataclasses.replace(plan, source=sources[plan.source]) for plan in plans]


def _check_processes(plan: Plan) -> None:
    """Refuse ``parallel=ep`` without one process per rank, or with a ``device_map``."""
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
    """Return the cell's record, or None if it is to be computed; refuse one of other documents."""
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
    """Return a library with the tasks of the missing cells, checked before a model is loaded."""
    from capmoe_eval.evaluation.loading import quiet_libraries
    from capmoe_eval.evaluation.tasks import TaskLibrary

    quiet_libraries()
    library = TaskLibrary()
    for plan in {(p.root, p.source, p.cell.task): p for p in plans}.values():
        library.check_metric(plan.cell.task, plan.source)
        fingerprint = library.fingerprint(plan.cell.task, plan.source)
        inputs.check(plan.root, plan.cell, {"data_fingerprint": fingerprint})
    return library


def _sandbox(
    plans: Sequence[Plan], library: TaskLibrary
) -> tuple[Sandbox | None, dict[Path, UsageError]]:
    """Return a sandbox that works if a task needs one, and why plans are refused, by their path."""
    running = [plan for plan in plans if library.runs_programs(plan.cell.task, plan.source)]
    refused = {
        plan.path: UsageError(
            f"tasks={plan.cell.task.name}: runs programs that the model writes, inside "
            "bubblewrap (apt install bubblewrap); allow it with allow_code_execution=true"
        )
        for plan in running
        if not plan.allow_code_execution
    }
    if len(refused) == len(running):
        return None, refused
    from capmoe_eval.evaluation.generation.sandbox import Sandbox

    try:
        return Sandbox.open(), refused
    except UsageError as error:
        return None, {plan.path: error for plan in running}


def _compute(
    plans: Sequence[Plan],
    finished: Sequence[Record],
    library: TaskLibrary,
    sandbox: Sandbox | None,
    progress: Progress,
    outcome: Outcome,
) -> Iterator[Record]:
    """Compute the missing cells model by model, and yield the record of each after it is written.

    ``finished`` are the records of the other cells; ``outcome`` receives counts and failures.
    """
    import torch

    own_threads = torch.get_num_threads()
    by_model: dict[tuple[object, ...], list[Plan]] = {}
    for plan in plans:
        key = (plan.cell.model, plan.device, plan.device_map, plan.parallel, plan.threads)
        by_model.setdefault(key, []).append(plan)
    for cells in by_model.values():
        torch.set_num_threads(own_threads)  # the model before may have changed it
        progress.loading(cells[0].cell.model.name)
        yield from _of_one_model(cells, plans, library, sandbox, finished, progress, outcome)
        gc.collect()  # only reference cycles still hold the model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    torch.set_num_threads(own_threads)


def _of_one_model(
    cells: Sequence[Plan],
    plans: Sequence[Plan],
    library: TaskLibrary,
    sandbox: Sandbox | None,
    finished: Sequence[Record],
    progress: Progress,
    outcome: Outcome,
) -> Iterator[Record]:
    """Compute the cells of one model among all plans, and yield the record of each."""
    from capmoe_eval.evaluation.evaluate import evaluate
    from capmoe_eval.evaluation.loading import Placement, load_lm
    from capmoe_eval.evaluation.provenance import provenance

    model, own = cells[0].cell.model, cells[0]
    placement = Placement(own.device, own.device_map, own.threads, own.parallel)
    lm: CapmoeLM | None = None
    for plan in cells:
        try:
            fingerprint = library.fingerprint(plan.cell.task, plan.source)
            loaded = lm or load_lm(model, placement, batch_size=1)
            now = {**provenance(loaded.model, loaded.reader), "data_fingerprint": fingerprint}
            if lm is None:
                warning = inputs.check(plan.root, plan.cell, now, finished)
                if warning is not None:
                    progress.warn(warning)
                loaded.agree("the cells to compute", "\n".join(str(p.path) for p in plans))
                loaded.on_rows, loaded.on_judged = progress.rows, progress.judged
            else:
                inputs.check(plan.root, plan.cell, now)
            lm = loaded
            progress.start(plan.cell)
            record = evaluate(plan.cell, lm, library, plan.source, root=plan.root, sandbox=sandbox)
            if not process_rank():
                inputs.note(record, plan.root)
                record.write()
            if (rounded := rounding_warning(record)) is not None:
                progress.warn(rounded, "rounding")
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise unwritable("results_dir", plan.root, error) from error
            if _ends_the_run(error, plan, plans, lm is not None, outcome):
                raise
            reason = _one_line(error)
            # Without the model no other cell of it can be computed.
            for failed in [plan] if lm else cells[cells.index(plan) :]:
                progress.fail(failed.cell, reason)
                outcome.failures.append((str(failed.cell), reason))
            if lm is None:
                break
            continue
        outcome.computed += 1
        progress.finish(record)
        yield record


def _ends_the_run(
    error: Exception, plan: Plan, plans: Sequence[Plan], loaded: bool, outcome: Outcome
) -> bool:
    """Return whether a run cannot go on after the error of one cell."""
    mistake = isinstance(error, UsageError)
    alike = len({plan.cell.model for plan in plans}) == 1 and (
        len({plan.cell.method for plan in plans}) == 1 or not loaded
    )
    return (
        isinstance(error, UnwritableError)  # no further cell could be written either
        or bool(os.environ.get("CAPMOE_DEBUG"))
        or (mistake and alike and not outcome.computed)  # all planned cells would fail alike
        # Under parallel=ep the other processes wait for this one: end them all.
        or (plan.parallel == "ep" and not (mistake and loaded))
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"[:500]
