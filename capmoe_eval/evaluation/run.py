"""Compute missing cells, model by model, and share them with the other processes of a directory.

A failed cell does not stop the others.
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.errors import (
    DISK_ERRORS,
    UnwritableError,
    UsageError,
    kind_and_place,
    unwritable,
    writing,
)
from capmoe_eval.evaluation.preparation import (
    cautions,
    check_backend,
    check_inputs,
    check_kept,
    check_processes,
    finished_record,
    join_ranks,
    load_lm,
    refusals,
    reserving,
    task_library,
    with_documents,
)
from capmoe_eval.evaluation.progress import Progress, RunSummary
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.packs import record_bytes
from capmoe_eval.experiment.processes import of_submitit, process_rank
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.reservations import (
    Reservation,
    holder_of,
    reserve,
    reserved,
)
from capmoe_eval.routing.registry import calibrations

if TYPE_CHECKING:
    from capmoe_eval.evaluation.evaluate import AnyLM
    from capmoe_eval.evaluation.tasks import TaskLibrary
    from capmoe_eval.wrapper.ranks import World


POLL: Final = 1.0
"""Seconds between two looks at cells that other processes compute."""


@dataclass(frozen=True)
class Turn:
    """A cell whose turn it is."""

    plan: CellPlan
    reservation: Reservation | None = None  # None where this process does not write the record
    finished: bool = False  # whether another process has written the record


def loads(plan: CellPlan) -> tuple[object, ...]:
    """Return what cells have in common for which a model is loaded once."""
    return plan.cell.model, plan.cell.backend, plan.placement


def take_turns(
    plans: Sequence[CellPlan], waiting: Callable[[Counter[str]], None] = lambda _: None
) -> Generator[Turn]:
    """Yield each cell once: to compute, reserved for this process, or finished by another.

    The cells of a model come one after the other. The next model is the one of which other
    processes compute the fewest cells at that moment, so processes that start together load
    different models. Cells that another process holds come last, also those of a killed one. A
    reservation ends when the next turn is asked for.

    Args:
        plans: The cells. With ``overwrite``, a record that is there now is computed again, and one
            that another process writes from now on is not.
        waiting: Is called every second while others hold all the cells that are left, with the
            number of cells that each holds.

    Raises:
        UnwritableError: If a results directory cannot be written.
    """
    old = {plan.path: _content(plan) for plan in plans if plan.overwrite}

    def is_finished(plan: CellPlan) -> bool:
        if not plan.overwrite:
            return plan.stored is not None
        return _content(plan) not in (None, old[plan.path])

    left: dict[tuple[object, ...], dict[Path, CellPlan]] = {}
    for plan in plans:
        left.setdefault(loads(plan), {})[plan.path] = plan
    loaded: tuple[object, ...] | None = None
    while paths := [path for cells in left.values() for path in cells]:
        held = reserved({path.parent for path in paths})  # a look at each directory, not cell
        order = sorted(left, key=lambda m: (m != loaded, len(held & left[m].keys())))
        cells = [plan for model in order for plan in left[model].values()]
        is_idle = True
        for plan in sorted(cells, key=lambda plan: plan.path in held):
            reservation = None
            if not (finished := is_finished(plan)):
                with writing("results_dir", plan.root):
                    reservation = reserve(plan.path)
                if reservation is None:  # another process holds it
                    continue
                finished = is_finished(plan)  # between the first look and the reservation
            is_idle = False
            del left[loads(plan)][plan.path]
            with reservation or nullcontext():
                yield Turn(plan, None if finished else reservation, finished)
            if not finished:
                loaded = loads(plan)
                break
        if is_idle:
            waiting(Counter(holder_of(path) or "another process" for path in paths))
            time.sleep(POLL)


def _content(plan: CellPlan) -> bytes | None:
    """Return the bytes of a cell's record, which packing leaves as they are, or None."""
    return None if plan.stored is None else record_bytes(plan.stored[0])


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
    progress = progress or Progress(stream=io.StringIO() if process_rank() else None)
    with reserving(plans), closing(progress):
        job = _prepare(plans, summary, progress)
        if job is not None:
            numbers = {plan.path: number for number, plan in enumerate(plans)}
            with closing(job.turns()) as turns:
                for record in job.records(turns):
                    summary.add(numbers[record.path], record)
    return summary


def _prepare(plans: Sequence[CellPlan], summary: RunSummary, progress: Progress) -> _Job | None:
    """Read the finished records, and refuse what can be refused without a model.

    Return what is to be computed, or None if all cells are finished.
    """
    absent: list[int] = []
    for number, plan in enumerate(plans):
        record = None if plan.overwrite else finished_record(plan)
        if record is None:
            absent.append(number)
        else:
            summary.add(number, record)
    check_kept(plans, {plans[number].path for number in absent})
    world = join_ranks(plans)
    missing = [plans[number] for number in (absent if world is None else world.tell(absent))]
    if not missing:
        return None
    for root in sorted({plan.root for plan in missing}):
        check_writable("results_dir", root)
    progress.total = len(missing)
    progress.stage("importing torch, transformers and lm-eval, and reading the tasks …")
    refused = refusals(missing)
    if len(refused) == len(missing):
        raise next(iter(refused.values()))
    allowed = [plan for plan in missing if plan.path not in refused]
    library = task_library(allowed)
    for line in cautions(allowed, library):
        progress.warn(line)
    job = _Job(allowed, library, world, progress, summary)
    for plan in missing:
        if plan.path in refused:
            job.fail(plan, str(refused[plan.path]))
    return job


@dataclass(frozen=True)
class _Job:
    """The cells that a run computes, and what all of them need."""

    plans: Sequence[CellPlan]
    library: TaskLibrary
    world: World | None
    progress: Progress
    summary: RunSummary  # receives counts and failures
    _compared: set[object] = field(default_factory=set)  # models and tasks whose records were

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
            names = ", ".join(f"{name} ({count})" for name, count in sorted(cells.items()))
            self.progress.print_once(f"waiting for {names} to compute what is left")
            tell(-1)  # the others would give up after half an hour without a word

        numbers = {plan.path: number for number, plan in enumerate(self.plans)}
        for turn in take_turns(self.plans, waiting):
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
                if not turn.finished:
                    lm = lm or self._load(plan)
                    record = self._compute(turn, lm)
                elif (written := finished_record(plan)) is not None:
                    record = written
                else:
                    raise UsageError(
                        f"{plan.path}: deleted after another process wrote it; run it again"
                    )
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
                self.progress.end(plan.cell, "computed by another process")
            else:
                self.summary.computed += 1
                self.progress.finish(record)
            yield record

    def fail(self, plan: CellPlan, reason: str) -> None:
        """Note that a cell failed, and why."""
        self.progress.end(plan.cell, f"FAILED: {reason}")
        self.summary.failures.append((str(plan.cell), reason))

    def _load(self, plan: CellPlan) -> AnyLM:
        """Load the model of a cell, and compare it with that of the finished records."""
        # Before the model, so that documents which cannot be read cost no time.
        self.library.fingerprint(plan.cell.task, plan.source)
        self.progress.stage(f"loading {plan.cell.model.name} …")
        lm = load_lm(plan)
        self._compare(plan, lm)
        lm.on_progress = self.progress.advance
        return lm

    def _compute(self, turn: Turn, lm: AnyLM) -> Record:
        """Compute a cell and write its record."""
        from capmoe_eval.evaluation import evaluate

        plan = turn.plan
        self._compare(plan, lm)
        self.progress.start(plan.cell)
        # The package that registers a kind of calibration reads it, or measures the stock model.
        kind = plan.cell.method.calibration
        applied = None
        if kind is not None:
            calibration = pkgutil.resolve_name(calibrations()[kind])
            applied = calibration.apply(plan, lm, self.progress.warn)
        observers = [of.observer() for of in plan.observers]
        record = evaluate.evaluate(
            plan.cell,
            lm,
            self.library,
            plan.source,
            root=plan.root,
            allow_code_execution=plan.allow_code_execution,
            applied=applied,
            observers=observers,
            samples=None if turn.reservation is None else plan.samples,
        )
        # Before the record, which says that the cell is finished.
        for of, observer in zip(plan.observers, observers, strict=True):
            of.write(plan, lm.meter, observer)
        if turn.reservation is not None:
            record.write()
        return record

    def _compare(self, plan: CellPlan, lm: AnyLM) -> None:
        """Compare weights and documents with those of the directory's records, once for a task."""
        key = plan.root, plan.source, plan.cell.task, loads(plan)
        if key not in self._compared:
            fingerprint = self.library.fingerprint(plan.cell.task, plan.source)
            origin = {**lm.origin(), "data_fingerprint": fingerprint}
            check_inputs(plan.root, plan.cell, origin)
            self._compared.add(key)

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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) if isinstance(error, UsageError) else kind_and_place(error)
