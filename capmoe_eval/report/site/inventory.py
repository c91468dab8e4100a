"""What there is to report: records, files that are none, and cells that nobody has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.configuration import Plan, model_notes, options, profile_name
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader, read_results, record_paths
from capmoe_eval.experiment.selection import composed, planned, read_finished, refuse_experiment
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import Bench, read_bench
from capmoe_eval.paper.layout import Layout, ModelSlot
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.tables.measured import model_slots

GRIDS: Final = ("grid.", "parts.")
"""Overrides of an experiment, which say nothing to a single cell."""


@dataclass(frozen=True)
class Experiment:
    """The cells of one table.

    Attributes:
        layout: The table.
        slots: Its models.
        planned: Its cells.
        records: Those that are finished.
        broken: How many files of its cells cannot be read.
        problem: Why there are no cells, or nothing.
    """

    layout: Layout
    slots: tuple[ModelSlot, ...] = ()
    planned: tuple[Plan, ...] = ()
    records: tuple[Record, ...] = ()
    broken: int = 0
    problem: str = ""

    @property
    def missing(self) -> int:
        """How many cells nobody has computed."""
        return len(self.planned) - len(self.records) - self.broken


@dataclass(frozen=True)
class Inventory:
    """All that a report is made of.

    Attributes:
        profile: The profile.
        overrides: What was said on the command line.
        records: Every whole record of the profile, in the order of their paths.
        broken: What is wrong with each file that is no whole record.
        experiments: The cells of each table of results.
        profiles: Number of files in the results of each profile.
        reader: Reads records, none of them twice.
        bench: What the benchmarks left.
        results: The results directory of the profile.
    """

    profile: str
    overrides: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    broken: tuple[str, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    profiles: Mapping[str, int] = field(default_factory=dict)
    reader: Reader = field(default_factory=Reader, compare=False)
    bench: Bench = field(default_factory=Bench)
    results: Path = Path("results")

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What must be said of the models' numbers."""
        return tuple(model_notes(plan for one in self.experiments for plan in one.planned))

    @cached_property
    def broken_promises(self) -> tuple[Record, ...]:
        """The records in which a proof failed."""
        return tuple(record for record in self.records if record.proofs.broken)


def take_inventory(overrides: Sequence[str], bench: Path = FOLDER) -> Inventory:
    """Read all records of a profile, and find out which cells of the tables are missing.

    Args:
        overrides: As for ``python -m capmoe_eval``, for example ``profile=zoo``.
        bench: Where the benchmarks wrote.

    Raises:
        UsageError: For a value that cannot be.
        HydraException: For an override that does not exist.
    """
    refuse_experiment(overrides)
    config = composed([word for word in overrides if not word.startswith(GRIDS)])
    reader = Reader()
    layouts = [layout for layout in TABLES if isinstance(layout, Layout)]
    experiments = tuple(_experiment(layout, overrides, reader) for layout in layouts)
    profile = profile_name(config)
    roots = {plan.root for experiment in experiments for plan in experiment.planned}
    roots = roots or {Path(str(config.results_dir))}
    found = [read_results(root, reader) for root in sorted(roots)]
    profile = str(config.profile.name)
    return Inventory(
        profile=profile,
        overrides=tuple(overrides),
        records=tuple(record for results in found for record in results.records),
        broken=tuple(line for results in found for line in results.broken),
        experiments=experiments,
        profiles=_profiles(profile, roots),
        reader=reader,
        bench=read_bench(bench),
        results=min(roots),
    )


def _experiment(layout: Layout, overrides: Sequence[str], reader: Reader) -> Experiment:
    """Return what is there of a table; a table that the profile cannot have takes no other away."""
    try:
        config, cells = planned([f"experiment={layout.key}", *overrides])
        slots = model_slots(config, layout.key)
    except (UsageError, HydraException, OmegaConfBaseException) as error:
        return Experiment(layout, problem=" ".join(str(error).split()))
    found = read_finished(cells, reader)
    return Experiment(layout, slots, tuple(cells), found.records, len(found.broken))


def _profiles(profile: str, roots: set[Path]) -> dict[str, int]:
    """Return how many files each profile has, where results lie as they are written."""
    places = {root.parent for root in roots if root.name == profile}
    counts = {
        name: sum(len(record_paths(place / name)) for place in places)
        for name in options("profile")
    }
    return {name: count for name, count in counts.items() if count or name == profile}
