"""What is finished of an experiment: the records of its cells, no others.

An evaluation with other settings that happens to lie in the results directory is not mixed in.
Needs no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from capmoe_eval.configuration import (
    Plan,
    check_overrides,
    config_directory,
    for_hydra,
    load_option,
    plans,
    register_resolvers,
)
from capmoe_eval.errors import UsageError
from capmoe_eval.record import Record, read_record
from capmoe_eval.report import ModelSlot

LEFT_OUT = "left out"
"""How a note on a record that cannot be read begins."""


class Reader:
    """Reads each record once, whatever the number of tables that show it."""

    def __init__(self) -> None:
        self._known: dict[Path, Record | UsageError] = {}

    def __call__(self, path: Path) -> Record:
        """Return the record at a path.

        Raises:
            UsageError: If it is no whole record.
        """
        if path not in self._known:
            try:
                self._known[path] = self.read(path)
            except UsageError as error:
                self._known[path] = error
        found = self._known[path]
        if isinstance(found, UsageError):
            raise found
        return found

    def read(self, path: Path) -> Record:
        """Read a record for the first time; who needs more of a record checks it here.

        Raises:
            UsageError: If it is no whole record.
        """
        return read_record(path)


def own_words(overrides: Sequence[str]) -> None:
    """Refuse words of a command line that would make a report out of another experiment.

    Raises:
        UsageError: Naming the word.
    """
    for word in overrides:
        if word.lstrip("+~").partition("=")[0] == "experiment":
            raise UsageError(
                f"{word}: what is reported says which experiment it is of; leave it out"
            )


@dataclass(frozen=True)
class Finished:
    """The records of an experiment that are there.

    Attributes:
        config: The composed configuration.
        plans: All cells of the experiment.
        records: Those that are finished, in the plans' order.
        broken: A note for each file that cannot be read.
        notes: What must be said of the models' numbers.
    """

    config: DictConfig
    plans: list[Plan]
    records: list[Record]
    broken: list[str]
    notes: list[str]


def finished(overrides: Sequence[str], reader: Reader | None = None) -> Finished:
    """Return what is finished of the experiment that a command line names.

    Args:
        overrides: As for ``python -m capmoe_eval``, for example ``experiment=table2``.
        reader: Reads the records; shared between experiments, it reads none of them twice.

    Raises:
        UsageError: For a value that cannot be.
        HydraException: For an override that does not exist.
    """
    config, cells = planned(overrides)
    check_overrides(config, overrides)
    reader = reader or Reader()
    records, broken = [], []
    for plan in cells:
        if plan.path.exists():
            try:
                records.append(reader(plan.path))
            except UsageError as error:
                broken.append(f"{LEFT_OUT}: {error}")
    models: dict[str, dict[str, None]] = {}
    for plan in cells:
        if plan.note:
            models.setdefault(plan.note, {})[plan.cell.model.name] = None
    notes = [f"{', '.join(names)}: {note}." for note, names in models.items()]
    return Finished(config, cells, records, broken, notes)


def planned(overrides: Sequence[str]) -> tuple[DictConfig, list[Plan]]:
    """Return the configuration that a command line composes, and the cells that it plans.

    Raises:
        UsageError: For a value that cannot be.
        HydraException: For an override that does not exist.
    """
    config, cells = _planned(tuple(overrides))
    return config.copy(), list(cells)


@functools.lru_cache(maxsize=64)  # a report asks for each of its experiments several times
def _planned(overrides: tuple[str, ...]) -> tuple[DictConfig, tuple[Plan, ...]]:
    config = composed(overrides)
    return config, tuple(plans(config))


def model_slots(config: DictConfig, table: str) -> tuple[ModelSlot, ...]:
    """Return the models of a table, in the order of its experiment's grid.

    Args:
        config: The composed experiment of the table.
        table: Its key, under which the profile may say what symbols such as ``2k`` stand for.

    Raises:
        UsageError: If there is no such model.
    """
    models = [load_option("model", key) for key in config.grid.model]
    symbols = dict(config.profile.get(f"{table}_m", {}))
    return tuple(ModelSlot(m.name, m.title, float(m.gamma), symbols) for m in models)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration that a command line composes.

    Raises:
        HydraException: For an override that does not exist.
    """
    return _composed(tuple(overrides)).copy()


@functools.lru_cache(maxsize=64)  # a report asks for each of its experiments several times
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        config: DictConfig = compose("config", overrides=for_hydra(overrides))
    return config
