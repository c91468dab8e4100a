"""Records, broken files and missing cells of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.configuration import Plan, model_notes, options, profile_name
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader, read_results, record_paths
from capmoe_eval.experiment.selection import Finished, finished
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import Bench, read_bench
from capmoe_eval.paper.layout import Layout
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.tables.measured import cell_config


@dataclass(frozen=True)
class Experiment:
    """The cells of one table.

    Attributes:
        layout: The table.
        found: Its cells, and those that are finished; None where there is a problem.
        problem: Why there are no cells, or nothing.
    """

    layout: Layout
    found: Finished | None = None
    problem: str = ""

    @property
    def plans(self) -> list[Plan]:
        """All cells."""
        return self.found.plans if self.found else []

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of cells: planned, finished, unreadable, and missing."""
        if self.found is None:
            return 0, 0, 0, 0
        planned, whole = len(self.found.plans), len(self.found.records)
        broken = len(self.found.broken)
        return planned, whole, broken, planned - whole - broken

    @property
    def missing(self) -> int:
        """The number of cells that nobody has computed."""
        return self.counts[-1]


@dataclass(frozen=True)
class Inventory:
    """All that a report is made of.

    Attributes:
        profile: The profile.
        overrides: What was said on the command line.
        records: Every whole record of the profile, in the order of their paths.
        broken: What is wrong with each file that is no whole record.
        experiments: The cells of each table of results, by the table's key.
        profiles: Number of files in the results of each profile.
        bench: What the benchmarks left.
        results: The results directory of the profile.
    """

    profile: str
    overrides: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    broken: tuple[str, ...] = ()
    experiments: Mapping[str, Experiment] = field(default_factory=dict)
    profiles: Mapping[str, int] = field(default_factory=dict)
    bench: Bench = field(default_factory=Bench)
    results: Path = Path("results")

    @cached_property
    def notes(self) -> list[str]:
        """Sentences on the models' numbers that every page of results shows."""
        return model_notes(plan for one in self.experiments.values() for plan in one.plans)

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
    config = cell_config(overrides)
    profile, reader = profile_name(config), Reader()
    experiments = {
        layout.key: _experiment(layout, overrides, reader)
        for layout in TABLES
        if isinstance(layout, Layout)
    }
    roots = {plan.root for experiment in experiments.values() for plan in experiment.plans}
    roots = roots or {Path(str(config.results_dir))}
    found = [read_results(root, reader) for root in sorted(roots)]
    return Inventory(
        profile=profile,
        overrides=tuple(overrides),
        records=tuple(record for results in found for record in results.records),
        broken=tuple(line for results in found for line in results.broken),
        experiments=experiments,
        profiles=_profiles(profile, roots),
        bench=read_bench(bench),
        results=min(roots),
    )


def _experiment(layout: Layout, overrides: Sequence[str], reader: Reader) -> Experiment:
    """Return what is there of a table; a table that the profile cannot have takes no other away."""
    try:
        return Experiment(layout, finished([f"experiment={layout.key}", *overrides], reader))
    except (UsageError, HydraException, OmegaConfBaseException) as error:
        return Experiment(layout, problem=" ".join(str(error).split()))


def _profiles(profile: str, roots: set[Path]) -> dict[str, int]:
    """Return how many files each profile has, where results lie as they are written."""
    places = {root.parent for root in roots if root.name == profile}
    counts = {
        name: sum(len(record_paths(place / name)) for place in places)
        for name in options("profile")
    }
    return {name: count for name, count in counts.items() if count or name == profile}
