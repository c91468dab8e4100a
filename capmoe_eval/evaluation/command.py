"""The command line: ``python -m capmoe_eval gamma=1.0 method=score``."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.version import version_line
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.configuration import (
    Plan,
    check_overrides,
    config_directory,
    for_hydra,
    model_notes,
    plans,
    share,
    store_knobs,
)
from capmoe_eval.experiment.processes import process_rank
from capmoe_eval.experiment.results import Reader
from capmoe_eval.experiment.settings import CALIBRATE


def execute(plans: Sequence[Plan], ask: bool | str = False) -> int:
    """Compute the plans and print the results; return 0 if every cell is finished, else 1.

    ``ask`` is the key ``plan``: true or ``calibrate`` for a forecast in place of the results.

    Raises:
        UsageError: For a mistake that concerns all planned cells.
    """
    # lm-eval's progress bars would disturb our display; tqdm reads this when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from capmoe_eval.evaluation.run import run
    from capmoe_eval.evaluation.summary import summary

    if ask:
        from capmoe_eval.evaluation.forecast import forecast

        print(forecast(plans, calibrate=ask == CALIBRATE))
        return 0
    outcome = run(plans)
    if process_rank() and any(plan.placement.parallel == "ep" for plan in plans):
        return 1 if outcome.failures else 0  # rank 0 prints
    if outcome.finished:
        print(summary(outcome.records, outcome.finished))
        skipped = outcome.finished - outcome.computed - outcome.by_others
        failed = len(outcome.failures)
        others = f"{outcome.by_others} by other processes, " if outcome.by_others else ""
        print(f"{outcome.computed} computed, {others}{skipped} finished before, {failed} failed")
    _print_notes(plans)
    for cell, reason in outcome.failures:
        print(f"failed: {cell}: {reason}", file=sys.stderr)
    return 1 if outcome.failures else 0


def report(plans: Sequence[Plan]) -> int:
    """Print the results of cells that jobs have computed; return 0 if all are there, else 1."""
    from capmoe_eval.evaluation.summary import SHOWN, summary

    broken: list[str] = []
    records = Reader().each((place for plan in plans if (place := plan.stored)), broken)
    first = list(itertools.islice(records, SHOWN))
    finished = len(first) + sum(1 for _ in records)
    if first:
        print(summary(first, finished))
    missing = len(plans) - finished
    print(f"{finished} finished, {missing} missing")
    _print_notes(plans)
    for line in broken:
        print(f"left out: {line}", file=sys.stderr)
    return 1 if missing else 0


def _print_notes(plans: Sequence[Plan]) -> None:
    for note in model_notes(sorted(plans, key=lambda p: (p.note or "", p.cell.model.name))):
        print(f"Note: {note}")


def _task(config: DictConfig) -> int:
    """Compute one configuration: a cell per task, or a whole grid."""
    job = HydraConfig.get()
    swept = job.mode == RunMode.MULTIRUN  # by a launcher that is not ours

    def compute() -> int:
        launcher = job.runtime.choices["hydra/launcher"]
        if not swept and launcher != "capmoe":
            raise UsageError(f"hydra/launcher={launcher}: starts the jobs of a sweep; add -m")
        check_overrides(config, list(job.overrides.task))
        return execute(share(plans(config), config.shard), config.plan)

    # Here and not only around Hydra, which adds a line of its own to any exception of a job.
    status = run_command(compute)
    # A launcher takes the end of a process for a crash: it gets the status, and sums up.
    if status and not (swept and status < 128):
        raise SystemExit(status)
    return status


def main() -> None:
    """Run the command line and exit: 0 done, 1 a cell failed, 2 bad input, 130 interrupted."""
    # Hydra would print its own report of an error and exit 1; we say it in one line and exit 2.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    command: Callable[[], int | None] = hydra.main(
        version_base="1.3", config_path=str(config_directory()), config_name="config"
    )(_task)

    def compose() -> int | None:
        if "--version" in sys.argv[1:]:  # Hydra would answer with its own
            print(version_line())
            return 0
        if any(word.startswith("--e") for word in sys.argv[1:]):  # also abbreviated
            raise UsageError(
                "--experimental-rerun: would run what is pickled in a file; repeat the command line"
            )
        store_knobs()
        sys.argv[1:] = for_hydra(sys.argv[1:])
        return command()

    sys.exit(run_command(compose))
