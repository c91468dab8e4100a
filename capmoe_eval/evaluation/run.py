"""Compute missing cells, model by model; a failed cell does not stop the others."""

from __future__ import annotations

import gc
import io
import itertools
import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import (
    DISK_ERRORS,
    UnwritableError,
    UsageError,
    kind_and_place,
    unwritable,
)
from capmoe_eval.evaluation.preparation import (
    cautions,
    check_backend,
    check_processes,
    check_traces,
    finished_record,
    join_ranks,
    layer_refusals,
    load_lm,
    model_refusals,
    reserving,
    sandbox_for,
    task_library,
    with_documents,
)
from capmoe_eval.evaluation.progress import Progress, RunSummary, rounding_warning
from capmoe_eval.experiment import inputs
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.files import check_writable, remove_strays
from capmoe_eval.experiment.processes import of_submitit, process_rank
from capmoe_eval.experiment.queue import Queue, Turn, loads
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.reservations import print_warning

if TYPE_CHECKING:
    from capmoe_eval.evaluation.evaluate import AnyLM
    from capmoe_eval.evaluation.generation.sandbox import Sandbox
    from capmoe_eval.evaluation.tasks import TaskLibrary
    from capmoe_eval.wrapper.ranks import World


def run(plans: Sequence[CellPlan], progress: Progress | None = None) -> RunSummary:
    """Compute every planned cell whose record is missing and that no other process computes.

    Everything that can be checked without a model is checked first, so that a long run does not
    stop half-way because of a typing error. Cells of one model run together, and each model is
    loaded once. The run ends when all records are there, whoever computed them.
    ``progress`` is the display; a new one on standard error by default.

    Raises:
        UsageError: For an unwritable results directory, a file there that is not a whole record, or
            a dataset that is not in ``data.root``. Also for a mistake that concerns all cells, such
            as a model that cannot be loaded. Nothing was computed.
        UnwritableError: Also if the disk is full in the middle of a run, which then stops.
    """
    for plan in plans:
        check_backend(plan)
        check_processes(plan)
    plans = with_documents(plans)
    summary = RunSummary()
    with reserving(plans):
        job = _prepare(plans, summary, progress)
        if job is not None:
            numbers = {plan.path: number for number, plan in enumerate(plans)}
            with closing(job.turns()) as turns:
                for record in job.records(turns):
                    summary.add(numbers[record.path], record)
    return summary


def _prepare(
    plans: Sequence[CellPlan], summary: RunSummary, progress: Progress | None
) -> _Job | None:
    """Read the finished records, and refuse what can be refused without a model.

    Return what is to be computed, or None if all cells are finished.
    """
    absent: list[int] = []
    others: dict[str, Record] = {}  # one finished record for each model and dataset
    for number, plan in enumerate(plans):
        record = None if plan.overwrite else finished_record(plan)
        if record is None:
            absent.append(number)
        else:
            summary.add(number, record)
            others.setdefault(inputs.decisive(record), record)
    if not process_rank():
        for line in inputs.newer_checkpoints(others.values()):
            print_warning(line)
    check_traces(plans, {plans[number].path for number in absent})
    world = join_ranks(plans)
    missing = [plans[number] for number in (absent if world is None else world.tell(absent))]
    if not missing:
        return None
    for root in sorted({plan.root for plan in missing}):
        check_writable("results_dir", root)
        remove_strays(sorted({plan.path.parent for plan in missing if plan.root == root}))
        inputs.prepare(root)
    sandbox, forbidden = sandbox_for(missing)
    refused = forbidden | model_refusals(missing)
    refused |= layer_refusals([plan for plan in missing if plan.path not in refused])
    if len(refused) == len(missing):
        raise next(iter(refused.values()))
    allowed = [plan for plan in missing if plan.path not in refused]
    library = task_library(allowed)
    progress = progress or Progress(len(missing), io.StringIO() if process_rank() else None)
    for line in cautions(allowed, library):
        progress.warn(line)
    job = _Job(allowed, list(others.values()), library, sandbox, world, progress, summary)
    for plan in missing:
        if plan.path in refused:
            job.fail(plan, str(refused[plan.path]))
    return job


@dataclass(frozen=True)
class _Job:
    """The cells that a run computes, and what all of them need."""

    plans: Sequence[CellPlan]
    finished: Sequence[Record]  # records of other cells, one for each model and dataset
    library: TaskLibrary
    sandbox: Sandbox | None
    world: World | None
    progress: Progress
    summary: RunSummary  # receives counts and failures

    def turns(self) -> Generator[Turn]:
        """Yield the cells' turns; of several ranks the first alone reserves, and tells them."""
        world = self.world
        tell = (lambda _: None) if world is None else world.tell
        if world is not None and world.rank:
            while (number := tell(None)) is not None:
                if number >= 0:
                    yield Turn(self.plans[number])
            return

        def waiting(cells: Counter[str]) -> None:
            self.progress.waiting(cells)
            tell(-1)  # the others would give up after half an hour without a word

        numbers = {plan.path: number for number, plan in enumerate(self.plans)}
        for turn in Queue(self.plans, waiting):
            if not turn.finished:
                tell(numbers[turn.plan.path])
            yield turn
        tell(None)

    def records(self, turns: Iterable[Turn]) -> Iterator[Record]:
        """Compute the cells whose turn it is, model by model, and yield the record of each."""
        import torch

        threads = torch.get_num_threads()
        for _, cells in itertools.groupby(turns, key=lambda turn: loads(turn.plan)):
            torch.set_num_threads(threads)  # the model before may have changed it
            yield from self._of_one_model(cells)
            gc.collect()  # only reference cycles still hold the model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        torch.set_num_threads(threads)

    def _of_one_model(self, turns: Iterable[Turn]) -> Iterator[Record]:
        lm: AnyLM | None = None
        unloadable: str | None = None  # the reason; no other cell can be computed without the model
        for turn in turns:
            plan = turn.plan
            if unloadable is not None and not turn.finished:
                self.fail(plan, unloadable)
                continue
            try:
                if turn.finished:
                    record = _written(plan)
                else:
                    lm = lm or self._load(plan)
                    record = self._compute(turn, lm)
            except Exception as error:
                if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                    raise unwritable("results_dir", plan.root, error) from error
                if self._is_ended_by(error, plan, loaded=lm is not None):
                    raise
                if lm is None and not turn.finished:
                    unloadable = _one_line(error)
                self.fail(plan, _one_line(error))
                continue
            if turn.finished:
                self.summary.by_others += 1
                self.progress.finished(plan.cell, turn.by)
            else:
                self.summary.computed += 1
                self.progress.finish(record)
            yield record

    def fail(self, plan: CellPlan, reason: str) -> None:
        """Note that a cell failed, and why."""
        self.progress.fail(plan.cell, reason)
        self.summary.failures.append((str(plan.cell), reason))

    def _load(self, plan: CellPlan) -> AnyLM:
        """Load the model of a cell, and compare it with that of the finished records."""
        # Before the model, so that documents which cannot be read cost no time.
        self.library.fingerprint(plan.cell.task, plan.source)
        self.progress.loading(plan.cell.model.name)
        lm = load_lm(plan)
        warning = inputs.check(plan.root, plan.cell, self._origin(plan, lm), self.finished)
        if warning is not None:
            self.progress.warn(warning)
        lm.on_rows, lm.on_judged = self.progress.rows, self.progress.judged
        return lm

    def _compute(self, turn: Turn, lm: AnyLM) -> Record:
        """Compute a cell and write its record."""
        from capmoe_eval.evaluation import evaluate
        from capmoe_eval.evaluation.calibration import apply_calibration
        from capmoe_eval.wrapper.observers.trace import Recorder

        plan = turn.plan
        inputs.check(plan.root, plan.cell, self._origin(plan, lm))
        self.progress.start(plan.cell)
        recorder = None if plan.save_trace is None else Recorder(plan.trace_tokens)
        record = evaluate.evaluate(
            plan.cell,
            lm,
            self.library,
            plan.source,
            root=plan.root,
            sandbox=self.sandbox,
            applied=apply_calibration(plan, lm, self.progress.warn),
            recorder=recorder,
        )
        if recorder is not None:  # before the record, which says that the cell is finished
            evaluate.write_trace(plan, lm.meter, recorder)
        if turn.reservation is not None:
            inputs.note(record, plan.root, self.progress.warn)
            record.write()
        if (line := rounding_warning(record)) is not None:
            self.progress.warn(line, "rounding")
        return record

    def _origin(self, plan: CellPlan, lm: AnyLM) -> dict[str, Any]:
        fingerprint = self.library.fingerprint(plan.cell.task, plan.source)
        return {**lm.origin(), "data_fingerprint": fingerprint}

    def _is_ended_by(self, error: Exception, plan: CellPlan, *, loaded: bool) -> bool:
        """Return whether the run cannot go on after the error of one cell."""
        mistake = isinstance(error, UsageError)
        alike = len({plan.cell.model for plan in self.plans}) == 1 and (
            len({plan.cell.method for plan in self.plans}) == 1 or not loaded
        )
        return (
            isinstance(error, UnwritableError)  # no further cell could be written either
            or of_submitit(error)  # it comes with a signal, at any moment
            or bool(os.environ.get("CAPMOE_DEBUG"))
            or (mistake and alike and not self.summary.computed)  # all cells would fail alike
            # Under parallel=ep the other processes wait for this one: end them all.
            or (plan.placement.parallel == "ep" and not (mistake and loaded))
        )


def _written(plan: CellPlan) -> Record:
    """Return the record of a cell that another process has computed during this run."""
    record = finished_record(plan)
    if record is None:
        raise UsageError(f"{plan.path}: deleted after another process wrote it; run it again")
    return record


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) if isinstance(error, UsageError) else kind_and_place(error)
