"""Compose the jobs of a sweep once for each choice of config groups.

Hydra composes every job anew, twice, from a dozen files: 0.16 s of CPU for each of 500 seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.errors import UsageError, first_line, shown
from capmoe_eval.evaluation.command import report
from capmoe_eval.experiment.configuration import plans, share
from capmoe_eval.experiment.processes import of_submitit

_MOST = 100_000


def _check_ranges(words: Sequence[str]) -> None:
    """Refuse a range without a value, whose sweep has no job, and one that never ends."""
    for override in OverridesParser.create().parse_overrides(list(words)):
        if not override.is_range_sweep():
            continue
        values: Any = override.value()
        if values.step and not 0 < (values.stop - values.start) / values.step <= _MOST:
            raise UsageError(
                f"{shown(override.input_line)}: must be a range of 1 to {_MOST} values, for "
                "example range(0,3)"
            )


class CellSweeper(BasicSweeper):
    """Hydra's own sweeper, which leaves it to our launcher to find out what cannot be composed.

    Jobs of another launcher run elsewhere: what they computed is read and summed up here.
    """

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose every job, unless the launcher does so in this process before it starts any."""
        if not self._is_ours():
            super().validate_batch_is_legal(batch)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs; of a launcher that is not ours, sum up what they computed elsewhere.

        Raises:
            SystemExit: With the highest status of a job, or 1 if a record is missing.
            UsageError: If a job of SLURM was lost, or reached its time limit too often.
        """
        _check_ranges(arguments)
        with self._one_line():
            returns = super().sweep(arguments)
        if not self._is_ours():
            assert self.hydra_context is not None and self.overrides is not None
            jobs = [words for batch in self.overrides for words in batch]
            configs = composed_jobs(self.hydra_context.config_loader, self.config, jobs)
            cells = (plan for config in configs for plan in share(plans(config), config.shard))
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

    def _is_ours(self) -> bool:
        return type(self.launcher).__module__ == f"{__package__}.launcher"


def composed_jobs(
    loader: ConfigLoader, config: DictConfig, jobs: Sequence[Sequence[str]]
) -> Iterator[DictConfig]:
    """Yield the configuration of each job, as Hydra composes it, without Hydra's own part.

    Args:
        loader: Hydra's.
        config: The configuration of the sweep.
        jobs: The overrides of each job.

    Raises:
        HydraException: For an override that cannot be.
    """
    parser = OverridesParser.create(config_loader=loader)
    known: dict[tuple[str, ...], DictConfig] = {}
    options = functools.cache(loader.get_group_options)

    def is_value(override: Override) -> bool:
        plain = override.package is None and not (override.is_add() or override.is_force_add())
        return plain and not override.is_delete() and not options(override.key_or_group)

    for words in jobs:
        overrides = parser.parse_overrides(list(words))
        values = [override for override in overrides if is_value(override)]
        choices = tuple(str(o.input_line) for o in overrides if o not in values)
        if choices not in known:
            known[choices] = _ours(loader.load_sweep_config(config, list(choices)))
        job = known[choices].copy()
        try:
            for override in values:
                OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            job = _ours(loader.load_sweep_config(config, list(words)))  # it says what is wrong
        OmegaConf.set_struct(job, False)
        yield job


def _ours(config: DictConfig) -> DictConfig:
    OmegaConf.set_readonly(config, False)
    with open_dict(config):
        config.pop("hydra")
    return config
