"""The sweeper of Hydra's other launchers: what their jobs computed is read and summed up here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore

from capmoe_eval.errors import UsageError, first_line
from capmoe_eval.evaluation.command import report
from capmoe_eval.experiment.composition import compose_jobs, sweep_jobs
from capmoe_eval.experiment.configuration import plans, share
from capmoe_eval.experiment.processes import of_submitit


class CellSweeper(BasicSweeper):
    """Hydra's own sweeper, which sums up what the jobs of a launcher have computed elsewhere."""

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs, and print what they have computed.

        Raises:
            SystemExit: With the highest status of a job, or 1 if a record is missing.
            UsageError: If a job of SLURM was lost, or reached its time limit too often.
        """
        jobs: Sequence[Sequence[str]] = sweep_jobs(arguments)
        with self._one_line():
            returns = super().sweep(arguments)
        cells = (
            plan for config in compose_jobs(jobs) for plan in share(plans(config), config.shard)
        )
        missing = report(list({plan.path: plan for plan in cells}.values()))
        with self._one_line():  # a job's error is raised where its value is asked for
            status = max(missing, *(job.return_value for batch in returns for job in batch))
        if status:
            raise SystemExit(status)
        return returns

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
                assert self.config is not None
                most, minutes = map(
                    self.config.hydra.launcher.get, ("max_num_timeout", "timeout_min")
                )
                lost = (
                    f"hydra.launcher.max_num_timeout={most}: a job reached its limit of {minutes} "
                    "minutes once more; set more of either"
                )
            kept = "finished cells are kept, and the same command continues"
            raise UsageError(f"{lost}; {kept}") from error


_store: Any = ConfigStore.instance()
_store.store(
    group="hydra/sweeper",
    name="capmoe",
    node={
        "_target_": f"{CellSweeper.__module__}.{CellSweeper.__name__}",
        "max_batch_size": None,
        "params": None,
    },
    provider="capmoe_eval",
)
