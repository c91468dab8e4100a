"""A Hydra launcher that computes a sweep in one process, each model loaded once.

Hydra's own launcher runs job after job: it would load the model for each, and count nothing.
``hydra/launcher=submitit_slurm``, ``ray`` and others still work; they call the task function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from capmoe_eval.evaluation.command import execute
from capmoe_eval.experiment.configuration import Plan, check_overrides, plans, share

from .compose import CellSweeper, composed_jobs


class CellLauncher(Launcher):
    """Turns the jobs of a sweep into cells, drops the duplicates and computes the rest."""

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember what Hydra gives."""
        del task_function
        self._context, self._config = hydra_context, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compute all jobs.

        Raises:
            SystemExit: With status 1 if a cell failed.
            UsageError: For a value that cannot be.
        """
        assert self._context is not None and self._config is not None
        del initial_job_idx
        loader = self._context.config_loader
        jobs = composed_jobs(loader, self._config, job_overrides)
        planned: dict[Path, Plan] = {}
        for overrides, config in zip(job_overrides, jobs, strict=True):
            check_overrides(config, overrides)
            planned |= {plan.path: plan for plan in plans(config)}
        status = execute(share(list(planned.values()), self._config.shard), self._config.plan)
        if status:
            raise SystemExit(status)
        return [JobReturn(list(words), status=JobStatus.COMPLETED) for words in job_overrides]


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
_store.store(
    group="hydra/launcher",
    name="capmoe",
    node={"_target_": f"{__name__}.{CellLauncher.__name__}"},
    provider="capmoe_eval",
)
