"""Computing cells: what is finished is skipped, what fails does not stop the rest."""

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

from capmoe_eval import inputs
from capmoe_eval.atomic import check_writable, remove_strays
from capmoe_eval.configuration import Plan
from capmoe_eval.errors import UnwritableError, UsageError, unwritable
from capmoe_eval.launched import process_count, process_rank
from capmoe_eval.progress import Progress
from capmoe_eval.record import Record, read_record

if TYPE_CHECKING:
    from capmoe_eval.harness.tasks import TaskLibrary


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of the disk, which every further cell would meet, too."""


@dataclass
class Outcome:
    """What became of the planned cells.

    Attributes:
        records: The records of all cells that are finished now, in the plans' order.
        computed: How many of them this run computed.
        failures: (cell, reason) of each cell that failed.
    """

    records: list[Record] = field(default_factory=list)
    computed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


def run(plans: Sequence[Plan], progress: Progress | None = None) -> Outcome:
    """Compute every planned cell whose record is missing.

    Everything that can be checked without a model is checked first, so that a long run does not
    stop half-way for a typing error. Cells of one model run together, and the model stays loaded.

    Args:
        plans: What to compute.
        progress: The display; a new one on standard error by default.

    Raises:
        UsageError: For an unwritable results directory, a file there that is no whole record, a
            dataset that is not in ``data.root``, or a mistake that concerns all cells, such as a
            model that cannot be loaded. Nothing was computed.
        UnwritableError: Also where the disk is full in the middle: nothing more is computed.
    """
    for plan in plans:
        _check_processes(plan)
    from capmoe_eval.harness.tasks import ready

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
    """Refuse expert parallelism over another number of processes than the cell has ranks."""
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
    """Return the cell's record if it is there and came from the documents at hand."""
    fingerprint = plan.source.fingerprint(plan.cell.task.dataset)
    if plan.overwrite or not plan.path.exists():
        return None
    record = read_record(plan.path, plan.root)
    recorded = record.capmoe["provenance"].get("data_fingerprint")
    if fingerprint is not None and recorded != fingerprint:  # the hub's is known when it is read
        raise UsageError(
            f"{plan.path}: computed from other documents (fingerprint {recorded}, now "
            f"{fingerprint}); name the new ones with data.name=NAME, or set overwrite=true"
        )
    return record


def _documents(plans: Sequence[Plan]) -> TaskLibrary:
    """Build the tasks of the missing cells, before a model is loaded for them.

    Raises:
        UsageError: If a task or its documents cannot be read, or are not those of the results.
    """
    from capmoe_eval.harness.loading import quiet_libraries
    from capmoe_eval.harness.tasks import TaskLibrary

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
    """Yield the record of each cell as it is written.

    Args:
        plans: The missing cells.
        finished: The records of the others.
        library: Built tasks.
        progress: The display.
        outcome: Where counts and failures go.
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
        torch.set_num_threads(own_threads)  # not those of the model before
        progress.loading((cells := list(group))[0].cell.model.name)
        yield from _of_one_model(cells, by_model, library, finished, progress, outcome)
        gc.collect()  # nothing holds the model now, but for the cycles in it
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
    """Yield the records of cells that share a loaded model; the model is free afterwards.

    Args:
        cells: The missing cells of the model.
        plans: Those of all models.
        library: Built tasks.
        finished: The records that were there before.
        progress: The display.
        outcome: Where counts and failures go.
    """
    from capmoe_eval.harness.evaluate import evaluate
    from capmoe_eval.harness.loading import Placement, load_lm
    from capmoe_eval.harness.provenance import provenance

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
                isinstance(error, UnwritableError)  # every further cell would be lost, too
                or os.environ.get("CAPMOE_DEBUG")
                or _hopeless(error, plans, lm is not None, outcome)
                or (plan.parallel == "ep" and not (isinstance(error, UsageError) and lm))
            ):
                raise  # the other processes may wait for us: all of them must end
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
    """Return whether a user's mistake concerns all that was asked for, so one line says it all."""
    models = {plan.cell.model for plan in plans}
    methods = {plan.cell.method for plan in plans}
    alike = len(models) == 1 and (len(methods) == 1 or not loaded)
    return isinstance(error, UsageError) and alike and not outcome.computed


def _fail_rest(cells: Sequence[Plan], reason: str, progress: Progress, outcome: Outcome) -> None:
    """Fail the cells of a model that cannot be loaded, without trying it again for each."""
    for plan in cells:
        progress.fail(plan.cell, reason)
        outcome.failures.append((str(plan.cell), reason))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"[:500]
