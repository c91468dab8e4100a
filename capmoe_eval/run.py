"""Computing cells: what is finished is skipped, what fails does not stop the rest."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capmoe_eval.atomic import check_writable
from capmoe_eval.cell import ModelId
from capmoe_eval.configuration import Plan
from capmoe_eval.errors import UnwritableError, UsageError, unwritable
from capmoe_eval.launched import process_count, process_rank
from capmoe_eval.progress import Progress
from capmoe_eval.record import Record, read_record

if TYPE_CHECKING:
    from torch import nn


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

    plans = [dataclasses.replace(plan, source=ready(plan.source)) for plan in plans]
    finished = {plan.path: _finished(plan) for plan in plans}
    missing = [plan for plan in plans if finished[plan.path] is None]
    for root in sorted({plan.root for plan in missing}):
        check_writable("results_dir", root)
    outcome = Outcome()
    if missing:
        progress = progress or Progress(len(missing), io.StringIO() if process_rank() else None)
        known = {r.cell.model: r for r in finished.values() if r is not None}
        finished |= {r.path: r for r in _compute(missing, known, progress, outcome)}
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
    record = read_record(plan.path)
    recorded = record.capmoe["provenance"].get("data_fingerprint")
    if recorded != fingerprint:
        raise UsageError(
            f"{plan.path}: computed from other documents (fingerprint {recorded}, now "
            f"{fingerprint}); name the new ones with data.name=NAME, or set overwrite=true"
        )
    return record


def _compute(
    plans: Sequence[Plan], known: Mapping[ModelId, Record], progress: Progress, outcome: Outcome
) -> Iterator[Record]:
    """Yield the record of each cell as it is written.

    Args:
        plans: The missing cells.
        known: A finished record of each model that has one.
        progress: The display.
        outcome: Where counts and failures go.
    """
    from capmoe_eval.harness.evaluate import evaluate
    from capmoe_eval.harness.loading import Placement, load_lm, quiet_libraries
    from capmoe_eval.harness.tasks import TaskLibrary

    quiet_libraries()
    library = TaskLibrary()
    for plan in plans:  # what a task lacks is said before a model is loaded
        library.get(plan.cell.task.lm_eval, plan.source)

    def key(plan: Plan) -> tuple[object, ...]:
        return (plan.cell.model, plan.device, plan.device_map, plan.parallel)

    order: dict[tuple[object, ...], int] = {}
    for plan in plans:
        order.setdefault(key(plan), len(order))
    by_model = sorted(plans, key=lambda plan: order[key(plan)])
    for _, group in itertools.groupby(by_model, key=key):
        cells = list(group)
        first = cells[0]
        lm = None
        progress.loading(first.cell.model.name)
        for plan in cells:
            try:
                if lm is None:
                    placement = Placement(
                        first.device, first.device_map, first.threads, first.parallel
                    )
                    loaded = load_lm(first.cell.model, placement, batch_size=1)
                    _check_weights(loaded.model, known.get(first.cell.model))
                    loaded.agree("the cells to compute", "\n".join(str(p.path) for p in plans))
                    lm = loaded
                    lm.on_rows = progress.rows
                progress.start(plan.cell)
                record = evaluate(plan.cell, lm, library, plan.source, root=plan.root)
                if not process_rank():
                    record.write()
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _DISK:
                    raise unwritable("results_dir", plan.root, error) from error
                if (
                    isinstance(error, UnwritableError)  # every further cell would be lost, too
                    or os.environ.get("CAPMOE_DEBUG")
                    or _hopeless(error, by_model, lm is not None, outcome)
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
        del lm  # before the next model needs the memory


def _check_weights(model: nn.Module, record: Record | None) -> None:
    """Refuse to put two models into one grid because they go by one name."""
    from capmoe_eval.harness.provenance import weights_hash

    if record is None:
        return
    recorded, now = record.capmoe["provenance"]["model"]["weights"], weights_hash(model)
    if recorded != now:
        raise UsageError(
            f"{record.path}: computed with other weights (hash {recorded}, now {now}); choose "
            "another results_dir, or compute all of it anew with overwrite=true"
        )


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
