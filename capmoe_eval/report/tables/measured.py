"""Tables filled with this suite's own results.

The records of a table are those of the cells of its experiment, no others: an evaluation with other
settings that happens to lie in the results directory is not mixed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.experiment.configuration import load_option, profile_name
from capmoe_eval.experiment.results import Reader
from capmoe_eval.experiment.selection import LEFT_OUT, composed, finished, refuse_experiment
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import Bench, read_bench
from capmoe_eval.paper.layout import ModelSlot, SettingsLayout, WorkloadLayout
from capmoe_eval.paper.tables import find_layout
from capmoe_eval.report.tables.fill import Measured, fill
from capmoe_eval.report.tables.published import Printed, printed_speedups
from capmoe_eval.report.tables.settings import TaskSettings, settings_table
from capmoe_eval.report.tables.table import Table
from capmoe_eval.report.tables.workload import STUDY, workload_table
from capmoe_eval.routing.method import DEFAULTS

_GRIDS = ("grid.", "parts.")  # overrides of an experiment, which say nothing to a single cell


def measured_table(
    name: str,
    overrides: Sequence[str] = (),
    reader: Reader | None = None,
    bench: Path | Bench = FOLDER,
) -> tuple[Table, str]:
    """Return a table filled with this suite's own results, and the name of its profile.

    Args:
        name: A table; those of results have an experiment in ``conf/experiment/``.
        overrides: What was said on the command line of the run.
        reader: Reads the records; shared between tables, it reads none of them twice.
        bench: What the benchmarks left, or where.

    Raises:
        UsageError: For a table or an override that does not exist.
    """
    layout = find_layout(name)
    refuse_experiment(overrides)
    if isinstance(layout, SettingsLayout):
        config = composed([word for word in overrides if not word.startswith(_GRIDS)])
        return settings_table(layout, _settings(layout)), profile_name(config)
    if isinstance(layout, WorkloadLayout):
        config = composed([word for word in overrides if not word.startswith(_GRIDS)])
        return _speedups(layout, bench), profile_name(config)
    found = finished([f"experiment={name}", *overrides], reader)
    folder, profile = profile_name(found.config), found.config.profile
    slots = model_slots(found.config, name)
    fills = [word for word in overrides if not word.startswith((*_GRIDS, "profile="))]
    source = Measured(found.records, overrides=fills, seeds=list(profile.seeds), printed=Printed())
    table = fill(layout, slots, source)
    notes = (*table.notes, *found.notes, *found.broken)
    return dataclasses.replace(table, notes=notes), folder


def _speedups(layout: WorkloadLayout, bench: Path | Bench) -> Table:
    """Return a table of timings, with a note on each of its files that cannot be read."""
    there = read_bench(bench) if isinstance(bench, Path) else bench
    table = workload_table(layout, there, printed_speedups(layout))
    broken = [f"{LEFT_OUT}: {line}" for line in there.broken_of(STUDY)]
    return dataclasses.replace(table, notes=(*table.notes, *broken))


def _settings(layout: SettingsLayout) -> dict[str, TaskSettings]:
    """Return what ``conf/tasks`` says of a table's tasks."""
    found = {}
    for setting in layout.settings:
        task = load_option("tasks", setting.task)[setting.task]
        found[setting.task] = TaskSettings(task.fewshot, task.metric, task.filter)
    return found


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
    knobs = {knob: config[knob] for knob in DEFAULTS}
    own_ranks = OmegaConf.is_interpolation(config, "ep_size")
    return tuple(
        ModelSlot(
            m.name,
            m.title,
            float(m.gamma),
            symbols,
            knobs | ({"ep_size": int(m.ep_size)} if own_ranks else {}),
        )
        for m in models
    )
