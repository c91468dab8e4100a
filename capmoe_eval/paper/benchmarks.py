"""The benchmark files of a directory, and which run a figure shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import BENCHMARKS
from capmoe_eval.paper.printed import DEPLOYMENTS, deployment
from capmoe_eval.results.timings import EVALUATIONS, no_timings, read_evaluation, read_timings

if TYPE_CHECKING:
    import pandas as pd

RUN = ["path", "run"]
"""The columns of times that tell runs apart."""


@dataclass(frozen=True)
class Bench:
    """The benchmark files of a directory."""

    folder: Path = BENCHMARKS
    # Times of all studies, as :func:`capmoe_eval.results.timings.timings_of` has them.
    timings: pd.DataFrame = field(default_factory=no_timings)
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # others, by name
    broken: tuple[str, ...] = ()  # the error of each other file, one line each

    def broken_of(self, study: str) -> list[str]:
        """Return what is wrong with the files of a study that cannot be read."""
        return [line for line in self.broken if f"ep-{study}-" in line]

    def times(self, study: str) -> pd.DataFrame:
        """Return the times of every run of a study, of all its files."""
        return self.timings[self.timings["study"] == study]

    def best(self, study: str) -> pd.DataFrame:
        """Return the times of one file of each model, in the order of the paper's figures.

        Of several the one with as many ranks as the paper has GPUs is taken: 8 emulated ranks show
        the paper's deployment, 2 measured ones do not. Then the one with most runs of the model,
        for those over several numbers of ranks belong together. Of those left a measured one goes
        before an emulated one, and a wider layer before a narrow one.
        """
        times = self.times(study)
        papers = {key: paper for key in times["key"].unique() if (paper := deployment(key))}
        ranks = {key: paper.ranks for key, paper in papers.items()}
        places = {key: DEPLOYMENTS.index(paper) for key, paper in papers.items()}
        runs = times.drop_duplicates(RUN)
        runs = runs.assign(
            deployed=runs["key"].map(ranks) == runs["ranks"],
            measured=runs["kind"] == "measured",
            width=-runs["scale"],
            place=runs["key"].map(places).fillna(len(DEPLOYMENTS)),
        )
        file = ["model", "path"]
        of_file = runs.groupby(file, as_index=False)
        files = of_file.max().assign(runs=of_file.size()["size"])
        by = ["deployed", "runs", "measured", "width", "date", "path"]
        best = files.sort_values(by, ascending=False, kind="stable").drop_duplicates("model")
        return best.sort_values(["place", "model"])[file].merge(times, on=file)


def ranks_text(run: pd.Series[Any]) -> str:
    """Return the deployment of a run, the first of its times, in a few words."""
    noun = "expert" if run["experts_per_rank"] == 1 else "experts"
    return f"{run['ranks']} ranks × {run['experts_per_rank']} {noun}"


def widths_text(run: pd.Series[Any]) -> str:
    """Return the layer's widths, against the model's own."""
    return "full widths" if run["scale"] == 1 else f"widths 1/{run['scale']:g}"


def kind_text(kind: str) -> str:
    """Return ``measured`` or ``EMULATED``, which cannot be overlooked."""
    return kind if kind == "measured" else kind.upper()


def circumstances(times: pd.DataFrame) -> Iterator[str]:
    """Yield what must be said of emulations, sizes, routing and machines."""
    for _, run in times.drop_duplicates(RUN).iterrows():
        if run["note"]:
            yield f"{run['note']}."
        if run["why"]:
            yield f"Sizes: {run['why'].rstrip('.')}."
        if run["loads_why"]:
            yield f"Routing of {run['model']}: {run['loads_why'].rstrip('.')}."
        if run["link"]:
            # What follows the semicolon is of this one run, and in the numbers.
            yield f"The emulated exchange: {run['link'].partition('; ')[0]}."
        yield (
            f"{Path(run['path']).name}: {run['machine']}; {run['dtype']}, median of "
            f"{run['rounds']} rounds, {run['date'][:10]}."
        )


def check_folder(folder: Path) -> None:
    """Refuse a directory that was named and is not there, by a UsageError."""
    if folder != BENCHMARKS and not folder.is_dir():
        raise UsageError(f"--bench={folder}: no such directory; leave it out for {BENCHMARKS}")


def read_bench(folder: Path = BENCHMARKS) -> Bench:
    """Read the files of a directory; a file that is not whole takes no other with it.

    A directory that was named and is not there is a UsageError.
    """
    check_folder(folder)
    broken: list[str] = []
    timings, evaluations = read_timings(folder, broken), {}
    for name in EVALUATIONS:
        if (path := folder / f"{name}.json").is_file():
            try:
                evaluations[name] = read_evaluation(path)
            except UsageError as error:
                broken.append(str(error))
    return Bench(folder, timings, evaluations, tuple(broken))
