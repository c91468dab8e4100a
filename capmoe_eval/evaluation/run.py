"""Compute missing cells, model by model, and share them with the other processes of a directory.

All that can be refused without a model is refused first; a failed cell does not stop the others.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import itertools
import os
import pkgutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import (
    DISK_ERRORS,
    UnwritableError,
    UsageError,
    bad_choice,
    kind_and_place,
    shown,
    unwritable,
    writing,
)
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.provenance import checkpoint_hash, method_source
from capmoe_eval.experiment.cell import (
    PROGRAMS,
    REAL,
    TINY,
    ZOO,
    Cell,
    ModelId,
    TaskId,
    checkpoint,
    is_of_hub,
)
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.packs import record_bytes
from capmoe_eval.experiment.processes import adopt_srun, of_submitit, process_count, process_rank
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.experiment.reservations import holder_of, release_all, reserve, reserved, tidy
from capmoe_eval.experiment.results import CALIBRATIONS, read_records, record_places
from capmoe_eval.lazy import torch
from capmoe_eval.routing.registry import calibrations
from capmoe_eval.zoo.hub import ready

if TYPE_CHECKING:
    from capmoe_eval.evaluation.evaluate import AnyLM
    from capmoe_eval.evaluation.tasks import TaskLibrary
    from capmoe_eval.wrapper.ranks import World


POLL: Final = 1.0
"""Seconds between two looks at cells that other processes compute."""

loads = attrgetter("cell.model", "cell.backend", "device", "device_map", "threads", "parallel")
"""Returns what cells have in common for which a model is loaded once."""


def take_turns(
    plans: Sequence[CellPlan], waiting: Callable[[Counter[str]], None] = lambda _: None
) -> Generator[tuple[CellPlan, bool]]:
    """Yield each cell once, with whether another process has finished it; others are reserved.

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
                yield plan, finished
            if not finished:
                loaded = loads(plan)
                break
        if is_idle:
            waiting(Counter(holder_of(path) or "another process" for path in paths))
            time.sleep(POLL)


def _content(plan: CellPlan) -> bytes | None:
    """Return the bytes of a cell's record, which packing leaves as they are, or None."""
    return None if plan.stored is None else record_bytes(plan.stored[0])


def run(plans: Sequence[CellPlan], progress: Progress | None = None) -> Progress:
    """Compute every planned cell whose record is missing and that no other process computes.

    Everything that can be checked without a model is checked first, so that a long run does not
    stop half-way because of a typing error. Cells of one model run together, and each model is
    loaded once. The run ends when all records are there, whoever computed them.
    ``progress`` counts and shows the cells; a new one on standard error by default. It is returned.

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
    progress = progress or Progress(stream=io.StringIO() if process_rank() else None)
    with reserving(plans), closing(progress):
        absent: list[int] = []
        for number, plan in enumerate(plans):
            if plan.overwrite or (record := finished_record(plan)) is None:
                absent.append(number)
            else:
                progress.add(number, record)
        check_kept(plans, {plans[number].path for number in absent})
        if (world := _joined(plans)) is not None:
            absent = world.tell(absent)
        if absent:
            _Computation(plans, [plans[number] for number in absent], world, progress).run()
    return progress


def _joined(plans: Sequence[CellPlan]) -> World | None:
    """Return the group of processes that compute every cell together; None if each is alone."""
    devices = [plan.device for plan in plans if plan.parallel == "ep"]
    if not devices:
        return None
    from capmoe_eval.evaluation.loading import chosen_device, join

    _, world = join(chosen_device(devices[0]))
    world.agree("the cells to compute", "\n".join(str(plan.path) for plan in plans))
    return world


class _Computation:
    """The cells that a run computes, and what all of them need."""

    def __init__(
        self,
        plans: Sequence[CellPlan],
        missing: Sequence[CellPlan],
        world: World | None,
        progress: Progress,
    ) -> None:
        """Refuse what can be refused of the missing cells without a model."""
        self.numbers = {plan.path: number for number, plan in enumerate(plans)}
        self.world, self.progress = world, progress
        # The models and tasks whose inputs were compared with those of the directory's records.
        self.compared: set[object] = set()
        self.overwritten = {plan.path for plan in missing if plan.overwrite}
        for root in sorted({plan.root for plan in missing}):
            check_writable("results_dir", root)
        progress.total = len(missing)
        progress.stage("importing torch, transformers and lm-eval, and reading the tasks …")
        refused = refusals(missing)
        self.plans = [plan for plan in missing if plan.path not in refused]
        self.library = task_library(self.plans)
        for line in cautions(self.plans, self.library):
            progress.warn(line)
        for plan in missing:
            if plan.path in refused:
                progress.fail(plan.cell, str(refused[plan.path]))

    def run(self) -> None:
        """Compute the cells whose turn it is, model by model."""
        threads = torch.get_num_threads()
        with closing(self._turns()) as turns:
            for _, cells in itertools.groupby(turns, key=lambda turn: loads(turn[0])):
                torch.set_num_threads(threads)  # the model before may have changed it
                self._compute_cells(cells)
                gc.collect()  # only reference cycles still hold the model
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        torch.set_num_threads(threads)

    def _turns(self) -> Generator[tuple[CellPlan, bool]]:
        """Yield the cells' turns; of several ranks the first alone reserves, and tells them."""
        world = self.world
        tell = (lambda _: None) if world is None else world.tell
        if world is not None and world.rank:
            plans = {self.numbers[plan.path]: plan for plan in self.plans}
            while (number := tell(None)) is not None:
                if number >= 0:
                    yield plans[number], False
            return

        def waiting(cells: Counter[str]) -> None:
            names = ", ".join(f"{name} ({count})" for name, count in sorted(cells.items()))
            self.progress.print_once(f"waiting for {names} to compute what is left")
            tell(-1)  # the others would give up after half an hour without a word

        for plan, is_finished in take_turns(self.plans, waiting):
            if not is_finished:
                tell(self.numbers[plan.path])
            yield plan, is_finished
        tell(None)

    def _compute_cells(self, turns: Iterable[tuple[CellPlan, bool]]) -> None:
        """Compute the cells of one model."""
        lm: AnyLM | None = None
        unloadable: str | None = None  # the reason; no other cell can be computed without the model
        for plan, is_finished in turns:
            if unloadable is not None and not is_finished:
                self.progress.fail(plan.cell, unloadable)
                continue
            try:
                if not is_finished:
                    lm = lm or self._load(plan)
                    record = self._compute(plan, lm)
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
                reason = kind_and_place(error)
                if isinstance(error, UsageError):
                    reason = " ".join(str(error).split())
                if lm is None and not is_finished:
                    unloadable = reason
                self.progress.fail(plan.cell, reason)
                continue
            self.progress.finish(self.numbers[plan.path], record, by_other=is_finished)

    def _load(self, plan: CellPlan) -> AnyLM:
        """Load the model of a cell, and compare it with that of the finished records."""
        # Before the model, so that documents which cannot be read cost no time.
        self.library.fingerprint(plan.cell.task, plan.source)
        self.progress.stage(f"loading {plan.cell.model.name} …")
        checkpoint = checkpoint_hash(plan.cell.model)
        lm = load_lm(plan)
        if checkpoint != checkpoint_hash(plan.cell.model):
            setting = f"model.pretrained={shown(plan.cell.model.pretrained)}"
            raise UsageError(f"{setting}: its files changed while they were loaded; run it again")
        lm.checkpoint = checkpoint
        self._compare(plan, lm)
        lm.on_progress = self.progress.advance
        return lm

    def _compute(self, plan: CellPlan, lm: AnyLM) -> Record:
        """Compute a cell; the first rank, or the only process, writes its record."""
        from capmoe_eval.evaluation import evaluate

        self._compare(plan, lm)
        self.progress.start(plan.cell)
        is_writer = self.world is None or not self.world.rank
        method, calibrated, layers = plan.cell.method, None, None
        # The package that registers a kind of calibration reads it, or measures the stock model.
        if (kind := method.calibration) is not None:
            calibration = pkgutil.resolve_name(calibrations()[kind])
            method, calibrated, layers = calibration.apply(plan, lm, self.progress.warn)
        observers = [of.observer() for of in plan.observers]
        record = evaluate.evaluate(
            plan,
            lm,
            self.library,
            method=method,
            calibrated=calibrated,
            layers=layers,
            observers=observers,
            samples=plan.samples if is_writer else None,
        )
        # Before the record, which says that the cell is finished.
        for of, observer in zip(plan.observers, observers, strict=True):
            of.write(plan, lm.meter, observer)
        if is_writer:
            record.write()
        return record

    def _compare(self, plan: CellPlan, lm: AnyLM) -> None:
        """Compare weights and documents with those of the directory's records, once for a task."""
        key = plan.root, plan.source, plan.cell.task, loads(plan)
        if key not in self.compared:
            fingerprint = self.library.fingerprint(plan.cell.task, plan.source)
            hashes = {"data_fingerprint": fingerprint, "checkpoint": lm.checkpoint}
            check_inputs(plan.root, plan.cell, lm.origin() | hashes, overwritten=self.overwritten)
            self.compared.add(key)

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
            or (mistake and alike and not self.progress.computed)  # all cells would fail alike
            # Under parallel=ep the other processes wait for this one: end them all.
            or (plan.parallel == "ep" and not (mistake and loaded))
        )


def check_backend(plan: CellPlan) -> None:
    """Refuse what a backend cannot compute, before anything is loaded.

    Raises:
        UsageError: The line says what to change, or what to install.
    """
    if (backend := _backend(plan)) is not None:
        backend.check(plan)


def load_lm(plan: CellPlan) -> AnyLM:
    """Load the model of a cell as its backend runs it, without a capacity yet.

    Raises:
        UsageError: If it cannot be loaded; the line says what to do.
    """
    if (backend := _backend(plan)) is not None:
        return backend.load_lm(plan)
    from capmoe_eval.evaluation import loading

    return loading.load_lm(
        plan.cell.model,
        plan.device,
        device_map=plan.device_map,
        threads=plan.threads,
        parallel=plan.parallel,
    )


def _backend(plan: CellPlan) -> Any | None:
    """Return the module of a cell's backend, an entry point; None for the suite's, transformers.

    It has ``check`` and ``load_lm``, which take the plan of a cell.
    """
    if (name := plan.cell.backend) == "transformers":
        return None
    backends = load_entry_points("capmoe_eval.backends")
    if name not in backends:
        check_installed(f"backend={name}")
    return backends[name]


def check_processes(plan: CellPlan) -> None:
    """Refuse ``parallel=ep`` without one process per rank, and what it cannot compute.

    Raises:
        UsageError: With the command that works.
    """
    if plan.parallel != "ep":
        return
    adopt_srun()
    ranks, started = plan.cell.method.ep_size, process_count()
    plan.cell.method.check_processes(started or ranks)
    if started is None:
        raise UsageError(
            "parallel=ep: needs one process per rank; start them with torchrun --nproc-per-node "
            f"{ranks} -m capmoe_eval … parallel=ep ep_size={ranks}, or with srun --ntasks {ranks} "
            f"capmoe-eval run … parallel=ep ep_size={ranks}"
        )
    if plan.device_map is not None:
        raise UsageError(
            f"device_map={plan.device_map}: under parallel=ep every process has one "
            "device; set device_map=null"
        )


@contextmanager
def reserving(plans: Sequence[CellPlan]) -> Iterator[None]:
    """Remove what killed processes left beside records and calibrations, and then this."""
    tasks = {plan.path.parent for plan in plans}
    models = {task.parent for task in tasks}  # where packs are written
    folders = sorted(tasks | models | {model / CALIBRATIONS for model in models})
    tidy(folders)
    try:
        yield
    finally:
        release_all()
        tidy(folders)


def with_documents(plans: Sequence[CellPlan]) -> list[CellPlan]:
    """Return the plans with their documents in place; embedded ones are written on first use."""
    sources = {source: ready(source) for source in {plan.source for plan in plans}}
    return [dataclasses.replace(plan, source=sources[plan.source]) for plan in plans]


def finished_record(plan: CellPlan) -> Record | None:
    """Return a cell's record, or None if there is none.

    Raises:
        UsageError: If it is not whole, or of other documents, local checkpoint or method's code.
    """
    fingerprint = plan.source.fingerprint(plan.cell.task.dataset)
    if (place := plan.stored) is None:
        return None
    record = read_record(*place)
    origin, model = record.provenance, plan.cell.model
    if fingerprint not in (None, origin.data_fingerprint):  # None: the hub's is not known yet
        raise UsageError(
            f"{record.path}: computed from other documents (fingerprint {origin.data_fingerprint}, "
            f"now {fingerprint}); name the new ones with data.name=NAME, choose another "
            "results_dir, or delete the old results"
        )
    code, files = f"code of method {record.method}", f"files of {shown(model.pretrained)}"
    for source, old, now in (
        (f"by other {code}", origin.method_source, method_source(plan.cell.method)),
        (f"from other {files}", origin.checkpoint, checkpoint_hash(model)),
    ):
        if None not in (old, now) and old != now:
            raise UsageError(
                f"{record.path}: computed {source} (hash {old}, now {now}); compute its cells "
                "again with overwrite=true, choose another results_dir, or delete the old results"
            )
    if (factor := plan.cell.method.written) is not None and factor.calibration is None:
        factor.check_layers(len(record.layers))
    return record


def check_inputs(
    root: Path,
    cell: Cell,
    provenance: Mapping[str, Any],
    documents: str | None = None,
    overwritten: Collection[Path] = (),
) -> None:
    """Refuse a computation whose weights, tokenizer, attention or documents are not a name's here.

    The model's and the task's records in a directory are compared, also the shipped ones that are
    read with the directory's.

    Args:
        root: The results directory.
        cell: The cell that is to be computed; a record in its own place is not compared.
        provenance: That of its future record; ``model`` is missing before a model is loaded.
        documents: The hash over the documents of a user's own task, if it is known.
        overwritten: Paths of records that the run computes again, which are not compared.

    Raises:
        UsageError: The line names a record with others.
    """
    places = {*record_places(root, task=cell.task.name)}
    if "model" in provenance:
        places |= {*record_places(root, cell.model.name)}
    of_task = f"task {cell.task.name}", "documents", cell.task, cell.data, cell.limit
    now = _inputs(cell, provenance) | {of_task: documents}
    for record in read_records(sorted(places), broken=[]):
        before = _inputs(record.cell, vars(record.provenance))
        if documents and (record.cell.task, record.cell.data, record.cell.limit) == of_task[2:]:
            before[of_task] = "+".join(part.documents for part in record.documents.values())
        for name, new in now.items():
            old, (title, field, *_) = before.get(name), name
            if None in (old, new) or old == new or record.path in {cell.path(root), *overwritten}:
                continue
            key = {"fingerprint": "data.name", "documents": "task name"}.get(field, "model.name")
            raise UsageError(
                f"{record.path.parents[2]}: {title} has other {field} than its results here, such "
                f"as {record.path} ({field} {old}, now {new}); choose another results_dir or "
                f"{key}, compute all of them again with overwrite=true, or delete the old results"
            )


def _inputs(cell: Cell, provenance: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Return the hashes of a cell's inputs, each by its title, its field and all that names it.

    A hash that is not known is None.
    """
    data = f"dataset {cell.task.dataset} of data {cell.data}"
    hashes: dict[tuple[Any, ...], Any] = {(data, "fingerprint"): provenance["data_fingerprint"]}
    if (model := provenance.get("model")) is not None:
        title = f"model {cell.model.name}"
        hashes |= {
            (title, "weights", cell.model.dtype): model.get("weights"),  # wherever they lie
            (title, "tokenizer", cell.model): model.get("tokenizer"),
            # An engine has kernels of its own.
            (title, "attention", cell.model, cell.backend): model.get("attention"),
            (title, "files", cell.model): provenance.get("checkpoint"),
        }
    return hashes


def check_kept(plans: Sequence[CellPlan], missing: Collection[Path]) -> None:
    """Refuse files beside records of finished cells, which are not computed, by a UsageError.

    ``missing`` are the paths of the records that a run is to compute.
    """
    for plan in plans:
        files = {of.setting: of.path(plan) for of in plan.observers}
        for setting, path in (*files.items(), ("log_samples=true", plan.samples)):
            if path is not None and plan.path not in missing and not path.exists():
                raise UsageError(
                    f"{setting}: {plan.cell} is finished without this file; add overwrite=true, or "
                    "another results_dir=, or leave the cell out (tasks= of the others alone)"
                )
        for of in plan.observers:
            check_writable(of.option, Path(getattr(of, of.option)))


def task_library(plans: Sequence[CellPlan]) -> TaskLibrary:
    """Return a library with the tasks of the missing cells, checked before a model is loaded.

    Raises:
        UsageError: For a task, metric or dataset that is not there.
    """
    import_libraries()
    from capmoe_eval.evaluation.tasks import TaskLibrary

    library, overwritten = TaskLibrary(), {plan.path for plan in plans if plan.overwrite}
    for plan in {(p.root, p.source, p.cell.task, p.cell.limit): p for p in plans}.values():
        task, source, limit = plan.cell.task, plan.source, plan.cell.limit
        check_task(library, task, source)
        hashes = {"data_fingerprint": library.fingerprint(task, source)}
        documents = library.documents(task, source, limit)
        check_inputs(plan.root, plan.cell, hashes, documents, overwritten)
    return library


def import_libraries() -> None:
    """Import lm-eval, datasets and transformers, and keep them from talking."""
    if first := "lm_eval" not in sys.modules:
        # Else it encodes all pictures to hash them, in samples that no record keeps.
        os.environ.setdefault("LMEVAL_HASHMM", "0")
        gc.disable()  # what an import makes stays: looking for garbage in it takes a second
    from capmoe_eval.evaluation.loading import quiet_libraries

    if first:
        gc.freeze()
        gc.enable()
    quiet_libraries()


def check_task(library: TaskLibrary, task: TaskId, source: DataSource) -> None:
    """Refuse a task that is not there, whose metric cannot be computed, or without a sandbox.

    Raises:
        UsageError: Naming the metrics that there are, or what is needed.
    """
    from capmoe_eval.evaluation.generation.mts_dialog import check_bertscore
    from capmoe_eval.evaluation.tasks import check_metric

    parts = library.parts(task, source).values()
    pairs = [
        f"{metric},{filters['name']}"
        for part in parts
        for metric in part.aggregation()
        for filters in part.get_config("filter_list") or [{"name": "none"}]
    ]
    key = f"{task.metric},{task.filter}"
    if key not in pairs:
        raise bad_choice(f"task {task.name}: metric,filter", key, dict.fromkeys(pairs))
    for part in parts:
        check_metric(task, part)
    check_bertscore(task, list(parts))
    if task.lm_eval not in PROGRAMS and any(getattr(p, "UNSAFE_CODE", False) for p in parts):
        raise UsageError(
            f"tasks.{task.name}.lm_eval={task.lm_eval}: would run what the model writes "
            f"without a sandbox; choose a task that has one, such as {PROGRAMS[0]}"
        )


def refusals(
    plans: Sequence[CellPlan], *checks: Callable[[CellPlan], None], asks_hub: bool = True
) -> dict[Path, UsageError]:
    """Return why cells cannot be computed, by the paths of their records.

    By default that is as far as files tell. A model of which that is said is not looked at further,
    and the libraries, which take seconds to be imported, are asked last. No weights are loaded.
    Without ``asks_hub``, a model of the hub is refused only by what is here of it.

    Raises:
        UsageError: The first reason, if none of the cells can be computed.
    """
    refused: dict[Path, UsageError] = {}
    for check in checks or (_check_programs, _check_checkpoint, _check_layers(asks_hub)):
        for plan in plans:
            if plan.path not in refused:
                try:
                    check(plan)
                except UsageError as error:
                    refused[plan.path] = error
    if refused and len(refused) == len(plans):
        raise next(iter(refused.values()))
    return refused


def _check_programs(plan: CellPlan) -> None:
    """Refuse programs that the model writes where they may not run, or have no sandbox."""
    if plan.cell.task.lm_eval not in PROGRAMS:
        return
    if not plan.allow_code_execution:
        raise UsageError(
            f"tasks={plan.cell.task.name}: runs programs that the model writes, inside "
            "bubblewrap (apt install bubblewrap); allow it with allow_code_execution=true"
        )
    from capmoe_eval.evaluation.generation.programs import sandbox

    sandbox()


def _check_checkpoint(plan: CellPlan) -> None:
    """Refuse a local model, or tokenizer, that is not there; the hub is not asked."""
    for field, file in (("pretrained", "config.json"), ("tokenizer", "")):
        name = getattr(plan.cell.model, field)
        if name is None or name.startswith((ZOO, TINY)) or is_of_hub(name):
            continue
        path = Path(checkpoint(name))
        if path.is_dir() and (path / file).exists():
            continue
        if name.startswith(REAL):
            raise UsageError(
                f"model.{field}={shown(name)}: {path} has no checkpoint; run `make real`"
            )
        reason = "it is no directory" if path.exists() else "no such directory"
        if path.is_dir():
            reason = f"it has no {file}"
        raise UsageError(
            f"model.{field}={shown(name)}: cannot be loaded ({reason}); set model.{field}=PATH to "
            "the directory of a checkpoint, or name a model of the hub, or an embedded one, for "
            "example model=tiny_olmoe"
        )


def _check_layers(asks_hub: bool) -> Callable[[CellPlan], None]:
    """Return what refuses methods that do not fit the MoE layers of a model's configuration.

    A configuration that cannot be read is refused, too; each is read once.
    """

    @functools.cache
    def layers(model: ModelId) -> tuple[Any, ...] | None:
        import_libraries()
        from capmoe_eval.evaluation.loading import model_config
        from capmoe_eval.wrapper.layers import announced_layers

        try:
            return announced_layers(model_config(model, asks_hub=asks_hub))
        except UsageError:
            if asks_hub or not is_of_hub(model.pretrained):
                raise
            return None

    def check(plan: CellPlan) -> None:
        method = plan.cell.method
        if method.factor is not None and method.factor.calibration is not None:
            method = method.at(1.0)  # its γ are not chosen yet
        if (announced := layers(plan.cell.model)) is not None:
            method.check_layers(*announced)

    return check


def idle(plan: CellPlan, knob: str) -> str | None:
    """Return why a knob's value changes nothing on a cell's model or task; None if it does."""
    method = plan.cell.method
    with suppress(UsageError):  # a run says it
        if knob == "renormalize" and method.setting(knob) == "after":
            from capmoe_eval.evaluation.loading import model_config

            text = model_config(plan.cell.model, asks_hub=False).get_text_config()
            if getattr(text, "norm_topk_prob", True) is False:
                return "these routers do not normalise their weights"
        if knob == "decode" and method.setting(knob) == "constrained":
            (plan,) = with_documents([plan])
            parts = task_library([plan]).parts(plan.cell.task, plan.source).values()
            if all(part.OUTPUT_TYPE != "generate_until" for part in parts):
                return "these tasks generate nothing"
    return None


def cautions(plans: Sequence[CellPlan], library: TaskLibrary) -> Iterator[str]:
    """Yield a line for each setting that does less, or more, than its user may think.

    These are a ``device_map`` without a GPU, and a limit, which is of each subtask of a task.
    """
    for device_map in dict.fromkeys(p.device_map for p in plans):
        if device_map is not None and not torch.accelerator.is_available():
            yield (
                f"device_map={device_map}: torch {torch.__version__} sees no GPU here; the model "
                "is computed on the CPU"
            )
    for task, source, limit in dict.fromkeys((p.cell.task, p.source, p.cell.limit) for p in plans):
        parts = library.parts(task, source).values()
        if limit is not None and len(parts) > 1:
            yield (
                f"limit={limit}: of each of the {len(parts)} subtasks of {task.name}, which are "
                f"{n_documents(parts, limit)} documents"
            )


def n_documents(parts: Iterable[Any], limit: int | None) -> int:
    """Return how many documents a cell evaluates of the (sub)tasks of its task."""
    counts = (len(part.eval_docs) for part in parts)
    return sum(count if limit is None else min(limit, count) for count in counts)
