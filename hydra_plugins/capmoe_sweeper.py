"""Hydra's sweeper of this suite: a process computes all jobs, or a launcher each elsewhere."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from capmoe_eval.errors import UsageError, first_line, shown
from capmoe_eval.evaluation.run_command import evaluate, print_results
from capmoe_eval.experiment.composition import as_typed, compose_words
from capmoe_eval.experiment.configuration import CellPlan, plans
from capmoe_eval.experiment.processes import of_submitit
from capmoe_eval.routing.knobs import Count, check

_MOST_JOBS = 100_000  # of a range
HERE = "basic"
"""Hydra's launcher that starts no process: here all jobs together load a model once."""


class CellSweeper(Sweeper):
    """Computes the jobs of a sweep, or has a launcher do so and sums up what they computed."""

    def __init__(self, max_batch_size: int | None = None) -> None:
        """Remember how many jobs a launcher gets at once; None for all."""
        self._at_once = max_batch_size

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Receive what Hydra has composed."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Compute the jobs, and print the results.

        Raises:
            SystemExit: With the highest status of a job, or 1 if a record is missing.
            UsageError: For a mistake in the words; if a job of SLURM was lost, or reached its time
                limit too often.
        """
        check("hydra.sweeper.max_batch_size", self._at_once, Count | None)
        jobs = sweep_jobs(arguments)
        configs = map(compose_words, jobs)
        if self.config.hydra.runtime.choices["hydra/launcher"] == HERE:
            words = as_typed(arguments)
            status = evaluate(zip(jobs, configs, strict=True), words)
            returns: list[Sequence[Any]] = []
        else:
            with self._one_line():
                returns = list(self._launched(jobs))
            cells = (plan for config in configs for plan in plans(config))
            missing = _report(list({plan.path: plan for plan in cells}.values()))
            with self._one_line():  # a job's error is raised where its value is asked for
                status = max(missing, *(job.return_value for batch in returns for job in batch))
        if status:
            raise SystemExit(status)
        return returns

    def _launched(self, jobs: Sequence[Sequence[str]]) -> Iterator[Sequence[Any]]:
        """Yield what the launcher returns of each batch of jobs."""
        size = self._at_once or len(jobs)
        for start in range(0, len(jobs), size):
            batch = jobs[start : start + size]
            self.validate_batch_is_legal(batch)
            yield self.launcher.launch(batch, initial_job_idx=start)

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Say in one line what submitit says in many."""
        try:
            yield
        except Exception as error:
            if not of_submitit(error):
                raise
            lost = f"hydra/launcher: a job was lost ({first_line(error)})"
            if "timed-out" in str(error):
                most, minutes = map(
                    self.config.hydra.launcher.get, ("max_num_timeout", "timeout_min")
                )
                lost = (
                    f"hydra.launcher.max_num_timeout={most}: a job reached its limit of {minutes} "
                    "minutes once more; set more of either"
                )
            kept = "finished cells are kept, and the same command continues"
            raise UsageError(f"{lost}; {kept}") from error


def sweep_jobs(words: Sequence[str]) -> list[list[str]]:
    """Return the words of each job of a sweep; UsageError for a range of no values or too many."""
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        values: Any = override.value()
        too_many = (
            override.is_range_sweep()
            and values.step
            and not (0 < (values.stop - values.start) / values.step <= _MOST_JOBS)
        )
        if too_many:
            raise UsageError(
                f"{shown(override.input_line)}: must be a range of 1 to {_MOST_JOBS} values, for "
                "example range(0,3)"
            )
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UsageError(
                f"{shown(override.input_line)}: must be a list or a range of values, for example "
                "choice(1,2) or range(0,3)"
            )
        of_key = (
            override.sweep_string_iterator()
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        key = override.get_key_element()
        choices[key] = [f"{key}={value}" for value in of_key]
    return [list(job) for job in itertools.product(*choices.values())]


def _report(cells: Sequence[CellPlan]) -> int:
    """Print the results of cells that jobs have computed; return 0 if all are there, else 1."""
    from capmoe_eval.evaluation.progress import Progress  # slow to import
    from capmoe_eval.experiment.results import read_records

    broken: list[str] = []
    done = Progress()
    places = (place for plan in cells if (place := plan.stored))
    for number, record in enumerate(read_records(places, broken)):
        done.add(number, record)
    missing = len(cells) - done.finished
    print_results(cells, done, f"{done.finished} finished, {missing} missing")
    for line in broken:
        print(f"left out: {line}", file=sys.stderr)
    return 1 if missing else 0


_store: Any = ConfigStore.instance()
_store.store(
    group="hydra/sweeper",
    name="capmoe",
    node={
        "_target_": f"{CellSweeper.__module__}.{CellSweeper.__name__}",
        "max_batch_size": None,
    },
    provider="capmoe_eval",
)
