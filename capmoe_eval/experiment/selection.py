"""The cells of an experiment and the records of those that are finished, no others."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import compose_words, for_hydra
from capmoe_eval.experiment.configuration import CellPlan, check_overrides, model_notes, plans
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import each_record, uncollected

LEFT_OUT = "left out"
"""The beginning of a note on a record that cannot be read."""


def refuse_experiment(overrides: Sequence[str]) -> None:
    """Refuse a word that names an experiment, since a report names its own (UsageError)."""
    for word in overrides:
        if word.lstrip("+~").partition("=")[0] == "experiment":
            raise UsageError(
                f"{word}: what is reported says which experiment it is of; leave it out"
            )


@dataclass(frozen=True)
class Finished:
    """The records of an experiment that are there."""

    config: DictConfig
    plans: list[CellPlan]  # of all cells of the experiment
    records: list[Record]  # of those that are finished, in the plans' order
    broken: list[str]  # a note for each file that cannot be read
    notes: list[str]  # the cautions about the models' numbers


def finished(overrides: Sequence[str]) -> Finished:
    """Return what is finished of the experiment that a command line names.

    Args:
        overrides: As for ``capmoe-eval run``, for example ``experiment=table2``. A value that
            cannot be is a UsageError, an unknown key a HydraException.
    """
    config, cells = composed(overrides), planned(overrides)
    broken: list[str] = []
    with uncollected():
        records = [*each_record((place for plan in cells if (place := plan.stored)), broken)]
    notes = [f"{LEFT_OUT}: {line}" for line in broken]
    return Finished(config, cells, records, notes, model_notes(cells))


def planned(overrides: Sequence[str]) -> list[CellPlan]:
    """Return the plans of the experiment that a command line names; errors as :func:`finished`."""
    cells = list(_planned(tuple(overrides)))
    check_overrides(composed(overrides), overrides)
    return cells


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a command line; HydraException for an unknown override."""
    config: DictConfig = pickle.loads(_composed(tuple(overrides)))
    return config


# A report asks for each of its experiments several times.
@functools.lru_cache(maxsize=64)
def _planned(overrides: tuple[str, ...]) -> list[CellPlan]:
    return plans(composed(overrides))


@functools.lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...]) -> bytes:
    """Return a configuration as pickle has it, which copies it in a sixth of deepcopy's time."""
    return pickle.dumps(compose_words(for_hydra(overrides)))
