"""Check and prepare all that cells need before a model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment import inputs
from capmoe_eval.experiment.configuration import Plan
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.processes import adopt_srun, process_count
from capmoe_eval.experiment.record import Record, read_record

if TYPE_CHECKING:
    from capmoe_eval.evaluation.generation.sandbox import Sandbox
    from capmoe_eval.evaluation.tasks import TaskLibrary


def check_processes(plan: Plan) -> None:
    """Refuse ``parallel=ep`` without one process per rank, and what it cannot compute.

    Raises:
        UsageError: With the command that works.
    """
    if plan.placement.parallel != "ep":
        return
    adopt_srun()
    ranks, started = plan.cell.method.ep_size, process_count()
    plan.cell.method.check_processes(started or ranks)
    if started is None:
        raise UsageError(
            "parallel=ep: needs one process per rank; start them with torchrun --nproc-per-node "
            f"{ranks} -m capmoe_eval … parallel=ep ep_size={ranks}, or with srun --ntasks {ranks} "
            f"python -m capmoe_eval … parallel=ep ep_size={ranks}"
        )
    if plan.placement.device_map is not None:
        raise UsageError(
            f"device_map={plan.placement.device_map}: under parallel=ep every process has one "
            "device; set device_map=null"
        )


def with_documents(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans with their documents in place; embedded ones are written on first use."""
    from capmoe_eval.evaluation.tasks import ready

    sources = {source: ready(source) for source in {plan.source for plan in plans}}
    return [dataclasses.replace(plan, source=sources[plan.source]) for plan in plans]


def finished_record(plan: Plan) -> Record | None:
    """Return a cell's record, or None if there is none.

    Raises:
        UsageError: If it is not whole, or of other documents.
    """
    fingerprint = plan.source.fingerprint(plan.cell.task.dataset)
    if (place := plan.stored) is None:
        return None
    record = read_record(*place)
    recorded = record.provenance.data_fingerprint
    if fingerprint is not None and recorded != fingerprint:  # None: the hub's is not known yet
        raise UsageError(
            f"{record.path}: computed from other documents (fingerprint {recorded}, now "
            f"{fingerprint}); name the new ones with data.name=NAME, choose another results_dir, "
            "or delete the old results"
        )
    return record


def trace_path(plan: Plan) -> Path | None:
    """Return the path of a cell's trace, that of its record below ``save_trace``; None for none."""
    if plan.save_trace is None:
        return None
    return Path(plan.save_trace) / plan.path.relative_to(plan.root).with_suffix(".npz")


def check_traces(plans: Sequence[Plan], missing: Collection[Path]) -> None:
    """Refuse traces of finished cells, which are not computed, by a UsageError.

    ``missing`` are the paths of the records that a run is to compute.
    """
    for plan in plans:
        path = trace_path(plan)
        if path is None:
            continue
        if plan.path not in missing and not path.exists():
            raise UsageError(
                f"save_trace={plan.save_trace}: {plan.cell} is finished, and nothing would be "
                "computed; add overwrite=true, or another results_dir="
            )
        check_writable("save_trace", Path(plan.save_trace or ""))


def task_library(plans: Sequence[Plan]) -> TaskLibrary:
    """Return a library with the tasks of the missing cells, checked before a model is loaded.

    Raises:
        UsageError: For a task, metric or dataset that is not there.
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


def sandbox_for(
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
