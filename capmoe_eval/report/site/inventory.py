"""Records, broken files and missing cells of a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

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

Made = TypeVar("Made")


def attempt(make: Callable[[], Made]) -> Made | str:
    """Return what a function makes, or why it cannot, in one line."""
    try:
        return make()
    except (UsageError, HydraException, OmegaConfBaseException) as error:
        return " ".join(str(error).split())


def missing_cells(found: Finished | str) -> int:
    """Return the number of cells of a table that nobody has computed."""
    if isinstance(found, str):
        return 0
    return len(found.plans) - len(found.records) - len(found.broken)


@dataclass(frozen=True)
class Inventory:
    """All that a report is made of.

    Attributes:
        profile: The profile.
        overrides: What was said on the command line.
        records: Every whole record of the profile, in the order of their paths.
        broken: What is wrong with each file that is no whole record.
        experiments: What is finished of each table of results, or why the profile cannot have the
            table, by the table's key.
        profiles: Number of files in the results of each profile.
        bench: What the benchmarks left.
        results: The results directory of the profile.
    """

    profile: str
    overrides: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    broken: tuple[str, ...] = ()
    experiments: Mapping[str, Finished | str] = field(default_factory=dict)
    profiles: Mapping[str, int] = field(default_factory=dict)
    bench: Bench = field(default_factory=Bench)
    results: Path = Path("results")

    @functools.cached_property
    def notes(self) -> list[str]:
        """Sentences on the models' numbers that every page of results shows."""
        return model_notes(_plans(self.experiments))


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
        layout.key: attempt(
            functools.partial(finished, [f"experiment={layout.key}", *overrides], reader)
        )
        for layout in TABLES
        if isinstance(layout, Layout)
    }
    roots = {plan.root for plan in _plans(experiments)} or {Path(str(config.results_dir))}
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


def _plans(experiments: Mapping[str, Finished | str]) -> Iterator[Plan]:
    for found in experiments.values():
        if not isinstance(found, str):
            yield from found.plans


def _profiles(profile: str, roots: set[Path]) -> dict[str, int]:
    """Return how many files each profile has, where results lie as they are written."""
    places = {root.parent for root in roots if root.name == profile}
    counts = {
        name: sum(len(record_paths(place / name)) for place in places)
        for name in options("profile")
    }
    return {name: count for name, count in counts.items() if count or name == profile}
