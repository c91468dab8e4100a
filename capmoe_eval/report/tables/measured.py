"""Tables filled with this suite's own results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.experiment.configuration import load_option, profile_name
from capmoe_eval.experiment.results import Reader
from capmoe_eval.experiment.selection import (
    Finished,
    composed,
    finished,
    planned,
    refuse_experiment,
)
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.paper.layout import Layout, ModelSlot, QueryLayout, SettingsLayout, WorkloadLayout
from capmoe_eval.paper.tables import find_layout
from capmoe_eval.report.tables.entries import Measured
from capmoe_eval.report.tables.fill import fill
from capmoe_eval.report.tables.others import query_table, settings_table, workload_table
from capmoe_eval.report.tables.table import Table
from capmoe_eval.routing.registry import knobs

GRIDS = ("grid.", "parts.")
"""Overrides of an experiment, which say nothing to a single cell."""


def cell_config(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration that a command line composes without an experiment.

    One that it names and a value that cannot be are a UsageError, an override that does not exist a
    HydraException.
    """
    refuse_experiment(overrides)
    words = [word for word in overrides if not word.startswith(GRIDS)]
    planned(words)
    return composed(words)


def measured_table(
    key: str, overrides: Sequence[str] = (), reader: Reader | None = None, bench: Path = FOLDER
) -> tuple[Table, str]:
    """Return a table filled with this suite's own results, and the name of its profile.

    A table that does not exist is a UsageError, errors of overrides as :func:`cell_config`.
    """
    return _measured_table(key, tuple(overrides), reader or Reader(), bench)


# A report shows a table on several pages; its reader reads no record twice either.
@functools.lru_cache(maxsize=64)
def _measured_table(
    key: str, overrides: tuple[str, ...], reader: Reader, bench: Path
) -> tuple[Table, str]:
    layout = find_layout(key)
    if isinstance(layout, (SettingsLayout, WorkloadLayout)):
        profile = profile_name(cell_config(overrides))
        if isinstance(layout, WorkloadLayout):
            return workload_table(layout, read_bench(bench)), profile
        tasks = [setting.task for setting in layout.settings]
        return settings_table(layout, {t: load_option("tasks", t)[t] for t in tasks}), profile
    refuse_experiment(overrides)
    experiment = layout.records if isinstance(layout, QueryLayout) else key
    found = finished([f"experiment={experiment}", *overrides], reader)
    if isinstance(layout, QueryLayout):
        return query_table(layout, found.records), profile_name(found.config)
    chosen = found.config.grid.model is None  # a model of the command line has its own profile
    folder = str(found.config.model.profile) if chosen else profile_name(found.config)
    return _results_table(layout, found, overrides), folder


def _results_table(layout: Layout, found: Finished, overrides: Sequence[str]) -> Table:
    """Return a table filled with the finished records of its experiment."""
    fills = [word for word in overrides if not word.startswith((*GRIDS, "profile="))]
    source = Measured(found.records, fills, list(found.config.profile.seeds))
    table = fill(layout, _slots(found.config, layout.key), source.row)
    return dataclasses.replace(table, notes=(*table.notes, *found.notes, *found.broken))


def _slots(config: DictConfig, table: str) -> list[ModelSlot]:
    """Return the models of a table's composed experiment, in the order of its grid."""
    symbols = dict(config.profile.get(f"{table}_m", {}))
    settings = {knob: config[knob] for knob in knobs()}
    own_ranks = OmegaConf.is_interpolation(config, "ep_size")
    return [
        ModelSlot(
            model.name,
            model.title,
            None if model.gamma is None else float(model.gamma),
            symbols,
            settings | ({"ep_size": int(model.ep_size)} if own_ranks else {}),
        )
        for model in (
            [config.model]
            if config.grid.model is None
            else [load_option("model", key) for key in config.grid.model]
        )
    ]
