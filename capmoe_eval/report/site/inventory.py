"""Records, in full or in brief, broken files and missing cells of a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from capmoe_eval.errors import UsageError, field_problem
from capmoe_eval.experiment.composition import options
from capmoe_eval.experiment.configuration import CellPlan, model_notes, profile_name
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.experiment.record import VERDICTS, Record
from capmoe_eval.experiment.results import LOCAL, Reader, directories, record_places
from capmoe_eval.experiment.selection import Finished, finished, planned
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import Bench, read_bench
from capmoe_eval.paper.layout import TABLES, Layout
from capmoe_eval.paper.verdicts import VerdictFile
from capmoe_eval.report.tables.filled import cell_config
from capmoe_eval.routing.factor import CapacityFactor

File = TypeVar("File", bound=BaseModel)
Made = TypeVar("Made")

PAGES: Final = 10_000
"""The number of files up to which each record has a page of its own, of some 20 kB; of more files,
those of tables."""


def attempt(make: Callable[[], Made]) -> Made | str:
    """Return what a function makes, or why it cannot, in one line."""
    try:
        return make()
    except (UsageError, HydraException, OmegaConfBaseException) as error:
        return " ".join(str(error).split())


def read(kind: type[File], path: Path) -> File | str:
    """Return a JSON file of a kind, or why it cannot be read."""
    try:
        return kind.model_validate_json(read_bytes(path))
    except OSError as error:
        return f"{path}: cannot be read ({error})"
    except ValidationError as error:
        return f"{path}: cannot be read ({field_problem(error)})"


def missing_cells(cells: Finished | str) -> int:
    """Return the number of cells of a table that nobody has computed."""
    if isinstance(cells, str):
        return 0
    return len(cells.plans) - len(cells.records) - len(cells.broken)


class Brief(NamedTuple):
    """The numbers of a record that lists show, in some 1 KiB of memory."""

    path: Path
    digest: str
    model: str
    task: str
    method: str
    factor: CapacityFactor | None  # capacity factor
    seed: int | None
    label: str  # of the method and its knobs
    images: bool  # whether its questions are about images
    value: float
    stderr: float | None
    n: int
    drop_rate: float
    peak_before: float
    peak_after: float
    broken: tuple[str, ...]  # names of invariants that failed
    examined: float | None  # share of the forwards that an independent check examined
    has_page: bool  # whether the site has a page of this record alone

    def __str__(self) -> str:
        """Return the cell in one short line."""
        return f"{self.model} {self.task} {self.label}"


def brief(record: Record, *, has_page: bool = True) -> Brief:
    """Return a record in a few numbers."""
    load = record.load
    return Brief(
        record.path,
        record.digest,
        record.model,
        record.task,
        record.method,
        record.factor,
        record.seed,
        record.cell.label,
        record.cell.task.images,
        record.value,
        record.stderr,
        record.n,
        load.drop_rate,
        load.peak_before,
        load.peak_after,
        tuple(record.proofs.broken),
        record.proofs.examined,
        has_page,
    )


@dataclass(frozen=True)
class Inventory:
    """All that a report is made of."""

    profile: str
    overrides: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()  # the directories of the records
    records: tuple[Brief, ...] = ()  # every whole record of the profile, in the order of paths
    paged: tuple[Record, ...] = ()  # those that have a page of their own, in the same order
    broken: tuple[str, ...] = ()  # what is wrong with each file that is no whole record
    # By a table of results: what is finished of it, or why the profile cannot have it.
    experiments: Mapping[str, Finished | str] = field(default_factory=dict)
    notes: Sequence[str] = ()  # on the models' numbers, which every page of results shows
    profiles: Mapping[str, int] = field(default_factory=dict)  # number of files in each
    bench: Bench = field(default_factory=Bench)
    reader: Reader = field(default_factory=Reader)  # of the records
    chosen_verdicts: Path | None = None  # the verdicts' file where the user named one

    @functools.cached_property
    def _by_place(self) -> dict[tuple[Path, str], Brief]:
        resolved = functools.cache(Path.resolve)  # a directory has many records
        return {(resolved(r.path.parent), r.path.name): r for r in self.records}

    def named(self, paths: Iterable[Path]) -> list[Brief | None]:
        """Return the records at some paths, None for what is none of this profile."""
        resolved = functools.cache(Path.resolve)
        return [self._by_place.get((resolved(path.parent), path.name)) for path in paths]

    def places(self, out: Path) -> list[Path]:
        """Return the directories that a report in ``out`` is made from and written to."""
        results = (place for root in self.roots for place in directories(root))
        return [*results, self.bench.folder, self.verdicts().parent, out]

    def verdicts(self) -> Path:
        """Return the file of the profile's verdicts: of several the one that judges most records.

        It is looked for when it is shown, as the replication may write it meanwhile.
        """

        def priority(path: Path) -> tuple[bool, int]:
            file = read(VerdictFile, path) if path.is_file() else None
            if isinstance(file, VerdictFile) and file.profile == self.profile:
                return True, file.records
            return path.is_file(), -1

        places = (place for root in self.roots or (Path(),) for place in directories(root))
        written = (place / VERDICTS for place in places)
        return self.chosen_verdicts or max(written, key=priority)


def results_directories(overrides: Sequence[str]) -> list[Path]:
    """Return the directories of the records that a profile's tables show, sorted.

    A value that cannot be is a UsageError, an override that does not exist a HydraException.
    """
    config = cell_config(overrides)
    tables = [
        attempt(functools.partial(planned, [f"experiment={layout.key}", *overrides]))
        for layout in TABLES
        if isinstance(layout, Layout)
    ]
    return _roots(
        config, (plan for table in tables if not isinstance(table, str) for plan in table)
    )


def _roots(config: DictConfig, plans: Iterable[CellPlan]) -> list[Path]:
    return sorted({plan.root for plan in plans} or {Path(str(config.results_dir))})


def take_inventory(
    overrides: Sequence[str], bench: Path = FOLDER, reader: Reader | None = None
) -> Inventory:
    """Read all records of a profile, and find out which cells of the tables are missing.

    A value that cannot be is a UsageError, an override that does not exist a HydraException.
    """
    config = cell_config(overrides)
    profile, reader = profile_name(config), reader or Reader()
    experiments = {
        layout.key: attempt(
            functools.partial(finished, [f"experiment={layout.key}", *overrides], reader)
        )
        for layout in TABLES
        if isinstance(layout, Layout)
    }
    there = [table for table in experiments.values() if isinstance(table, Finished)]
    plans = [plan for table in there for plan in table.plans]
    roots = _roots(config, plans)
    places = [place for root in roots for place in record_places(root)]
    if len(places) <= PAGES:
        reader.all(places)
    named = {record.path for table in there for record in table.records}
    records, paged, broken = [], [], list[str]()
    for record in reader.each(places, broken):
        has_page = len(places) <= PAGES or record.path in named
        records.append(brief(record, has_page=has_page))
        if has_page:
            paged.append(record)
    return Inventory(
        profile=profile,
        overrides=tuple(overrides),
        roots=tuple(roots),
        records=tuple(records),
        paged=tuple(paged),
        broken=tuple(broken),
        experiments=experiments,
        notes=model_notes(plans),
        profiles=_profiles(profile, roots) | {profile: len(places)},
        bench=read_bench(bench),
        reader=reader,
    )


def _profiles(profile: str, roots: Sequence[Path]) -> dict[str, int]:
    """Return how many files each profile has, where results lie as they are written."""
    beside = {root for root in roots if root.name.removeprefix(LOCAL) == profile}
    counts = {
        name: sum(
            len(record_places(root.with_name(root.name.removesuffix(profile) + name)))
            for root in beside
        )
        for name in options("profile")
    }
    return {name: count for name, count in counts.items() if count}
