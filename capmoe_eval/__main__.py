"""The command line: ``python -m capmoe_eval gamma=1.0 method=score``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from capmoe_eval.application import execute, run_command
from capmoe_eval.configuration import (
    check_overrides,
    config_directory,
    for_hydra,
    plans,
    register_resolvers,
    share,
)


def _task(config: DictConfig) -> None:
    """Compute one configuration: a cell per task, or a whole grid."""

    def compute() -> int:
        check_overrides(config, list(HydraConfig.get().overrides.task))
        return execute(share(plans(config), config.shard))

    # Here and not only around Hydra, which adds a line of its own to any exception of a job.
    status = run_command(compute)
    if status:
        raise SystemExit(status)


def main() -> None:
    """Run the command line and exit: 0 done, 1 a cell failed, 2 bad input, 130 interrupted."""
    # Hydra would print its own report of an error and exit 1; we say it in one line and exit 2.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    register_resolvers()
    command: Callable[[], int | None] = hydra.main(
        version_base="1.3", config_path=str(config_directory()), config_name="config"
    )(_task)

    def compose() -> int | None:
        sys.argv[1:] = for_hydra(sys.argv[1:])
        return command()

    sys.exit(run_command(compose))


if __name__ == "__main__":
    main()
