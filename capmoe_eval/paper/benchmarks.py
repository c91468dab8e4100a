"""The benchmark files of a directory, and which run a figure shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.names import EVALUATIONS, FOLDER
from capmoe_eval.paper.printed import DEPLOYMENTS, deployment

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.rows import Balance
    from capmoe_eval.experiment.timings.schema import Evaluation, Run, Study

_File = TypeVar("_File")


@dataclass(frozen=True)
class ShownRun:
    """A run, and the file that it is in."""

    study: Study
    run: Run

    @property
    def kind(self) -> str:
        """``measured`` or ``EMULATED``, which cannot be overlooked."""
        return "EMULATED" if self.study.emulated else "measured"

    @property
    def ranks(self) -> str:
        """The deployment in a few words."""
        noun = "expert" if self.run.experts_per_rank == 1 else "experts"
        return f"{self.run.ranks} ranks × {self.run.experts_per_rank} {noun}"

    @property
    def widths(self) -> str:
        """The layer's widths, against the model's own."""
        scale = self.study.scale
        return "full widths" if scale == 1 else f"widths 1/{scale:g}"


@dataclass(frozen=True)
class Bench:
    """The benchmark files of a directory."""

    folder: Path = FOLDER
    studies: tuple[Study, ...] = ()  # whole files, in the order of their names
    evaluations: tuple[Evaluation, ...] = ()  # whole files of the other benchmarks
    broken: tuple[str, ...] = ()  # the error of each other file, one line each

    @property
    def balances(self) -> list[Balance]:
        """The measurements of lossless load balancing."""
        return [row for file in self.evaluations for row in file.balances]

    def broken_of(self, study: str) -> list[str]:
        """Return what is wrong with the files of a study that cannot be read."""
        return [line for line in self.broken if f"ep-{study}-" in line]

    def runs(self, study: str) -> list[ShownRun]:
        """Return every run of a study, of all its files."""
        return [
            ShownRun(file, run) for file in self.studies if file.study == study for run in file.runs
        ]

    def best(self, study: str) -> list[ShownRun]:
        """Return one run of each model, in the order of the paper's figures.

        Of several the one with as many ranks as the paper has GPUs is taken: 8 emulated ranks show
        the paper's deployment, 2 measured ones do not. Of those left a measured one goes before
        an emulated one, and a wider layer before a narrow one.
        """

        def priority(run: ShownRun) -> tuple[object, ...]:
            file, paper = run.study, deployment(run.run.model)
            deployed = paper is not None and paper.ranks == run.run.ranks
            return (deployed, not file.emulated, -file.scale, file.date, file.path.name)

        def place(run: ShownRun) -> tuple[int, str]:
            paper = deployment(run.run.model)
            return (DEPLOYMENTS.index(paper) if paper else len(DEPLOYMENTS), run.run.title)

        best: dict[str, ShownRun] = {}
        for run in sorted(self.runs(study), key=priority, reverse=True):
            best.setdefault(run.run.title, run)
        return sorted(best.values(), key=place)

    def fullest(self, study: str) -> list[ShownRun]:
        """Return the runs of one file: that which has most of them.

        For a study over numbers of ranks, whose runs belong together. Of files with equally many a
        measured one goes before an emulated one, and a wider layer before a narrow one.
        """
        files = [file for file in self.studies if file.study == study]
        files.sort(key=lambda f: (len(f.runs), not f.emulated, -f.scale, f.date), reverse=True)
        return [ShownRun(file, run) for file in files[:1] for run in file.runs]


def check_folder(folder: Path) -> None:
    """Refuse a directory that was named and is not there, by a UsageError."""
    if folder != FOLDER and not folder.is_dir():
        raise UsageError(f"--bench={folder}: no such directory; leave it out for {FOLDER}")


def read_bench(folder: Path = FOLDER) -> Bench:
    """Read the files of a directory; a file that is not whole takes no other with it.

    A directory that was named and is not there is a UsageError.
    """
    check_folder(folder)
    from capmoe_eval.experiment.timings.schema import read_evaluation, read_study

    broken: list[str] = []

    def whole(read: Callable[[Path], _File], paths: Iterable[Path]) -> Iterator[_File]:
        for path in paths:
            try:
                yield read(path)
            except UsageError as error:
                broken.append(str(error))

    studies = tuple(whole(read_study, sorted(folder.glob("ep-*.json"))))
    paths = (folder / f"{name}.json" for name in EVALUATIONS)
    evaluations = tuple(whole(read_evaluation, filter(Path.is_file, paths)))
    return Bench(folder, studies, evaluations, tuple(broken))
