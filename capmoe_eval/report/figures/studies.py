"""The runs of a figure that shows benchmarks: which there are, and how to get the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, Shown
from capmoe_eval.paper.printed import deployment
from capmoe_eval.report.figures.spec import Numbers, StudySpec

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Label, Point, Timing


@dataclass(frozen=True)
class FigureStudies:
    """The runs that a figure shows.

    Attributes:
        profile: Name of the profile, under which the figure is written.
        study: The study.
        shown: The runs, in the order of the paper.
        folder: Where its files should lie.
        planned: Number of models that there should be; 1 where any will do.
        n_absent: How many of them have no run.
        notes: Of each file that cannot be read, and of runs that are not shown.
    """

    profile: str
    study: str
    shown: tuple[Shown, ...]
    folder: str
    planned: int = 1
    n_absent: int = 0
    notes: tuple[str, ...] = ()
    unit = "runs"

    @property
    def absent(self) -> tuple[str, ...]:
        """The command that measures what is missing."""
        return (bench_command(self.study),) if self.n_absent else ()

    @property
    def digests(self) -> list[str]:
        """The digests of the files."""
        return list(dict.fromkeys(one.study.digest for one in self.shown))

    @property
    def names(self) -> Mapping[str, str]:
        """Fields of the templates of title and caption."""
        return {"kind": kind(self.shown), "profile": self.profile}

    def nothing(self, name: str) -> UsageError:
        """Return the error for a figure without any run, with the command that makes one."""
        broken = [note for note in self.notes if note.startswith("Left out")]
        why = f" ({broken[0].rstrip('.')})" if broken else ""
        return UsageError(
            f"{name}: no file of study {self.study} in {self.folder}{why}; measure it: "
            f"{bench_command(self.study)}"
        )


def gather_study(spec: StudySpec, bench: Bench, profile: str) -> FigureStudies:
    """Return the runs of a figure; a file that cannot be read is left out and named in a note."""
    shown = bench.best(spec.study) if spec.runs == "best" else bench.fullest(spec.study)
    there = {found.name for one in shown if (found := deployment(one.run.model))}
    lacking = [name for name in spec.models if name not in there]
    if spec.models:  # any other shape is not of this figure
        shown = [one for one in shown if (d := deployment(one.run.model)) and d.name in spec.models]
    broken = [f"Left out: {line}." for line in bench.broken_of(spec.study)]
    notes = [*broken, *_circumstances(shown), *_others(shown, bench.runs(spec.study))]
    if lacking and shown:
        notes.append(f"No run of {', '.join(lacking)}.")
    return FigureStudies(
        profile=profile,
        study=spec.study,
        shown=tuple(shown),
        folder=str(bench.folder),
        planned=len(spec.models) or 1,
        n_absent=len(lacking) if spec.models else int(not shown),
        notes=tuple(notes),
    )


def kind(shown: Iterable[Shown]) -> str:
    """Return how some runs were timed, as a title says it."""
    kinds = {one.study.kind for one in shown}
    if len(kinds) == 2:
        return "partly EMULATED"
    return "EMULATED" if kinds == {"emulated"} else "measured"


def _circumstances(shown: Iterable[Shown]) -> list[str]:
    """Return what must be said of emulations, sizes, routing and machines, each once."""
    notes = [f"{one.study.note}." for one in shown if one.study.note]
    for one in shown:
        if one.study.why:
            notes.append(f"Sizes: {one.study.why.rstrip('.')}.")
        if one.run.why:
            notes.append(f"Routing of {one.run.title}: {one.run.why.rstrip('.')}.")
        if one.run.link:
            # What follows the semicolon is of this one run, and in the numbers.
            source = one.run.link.source.partition("; ")[0]
            notes.append(f"The emulated exchange: {source}.")
        notes.append(
            f"{one.study.path.name}: {one.study.machine}; {one.study.dtype}, median and quartiles "
            f"of {one.study.repeats} rounds, {one.study.date[:10]}."
        )
    return list(dict.fromkeys(notes))


def _others(shown: Sequence[Shown], there: Iterable[Shown]) -> list[str]:
    """Say which runs of the study are not shown, a line for each file."""
    files: dict[str, list[str]] = {}
    for one in there:
        if one not in shown:
            name = f"{one.study.path.name} ({one.kind})"
            files.setdefault(name, []).append(f"{one.run.title} on {one.ranks}")
    return [f"Not shown, from {name}: {', '.join(runs)}." for name, runs in files.items()]


def about(one: Shown, point: Point) -> Numbers:
    """Return what a panel says of its run."""
    return {
        "model": one.run.title,
        "kind": one.study.kind,
        "file": one.study.path.name,
        "ranks": one.run.ranks,
        "experts_per_rank": one.run.experts_per_rank,
        "deployment": one.ranks,
        "scale": one.study.scale,
        "widths": one.widths,
        "tokens_per_rank": point.tokens_per_rank,
        "batch": point.batch,
        "prompt": point.prompt,
        "place": point.place,
        "routing": point.routing.source,
        "peak": point.routing.peak,
        "link": None if one.run.link is None else one.run.link.source,
    }


def capacity_rows(timings: Iterable[Timing]) -> list[tuple[Label, Timing]]:
    """Return the rows that have a method: all but dropless."""
    return [(row.label, row) for row in timings if row.label is not None]


def method_name(label: Label) -> str:
    """Return a method as the paper calls it, with what is unusual about it."""
    name = method_title(label.name)
    if label.name == "expanded_drop" and label.candidates != "local":
        name += f" ({label.candidates})"
    return name if label.granularity == "expert" else f"{name}, {label.granularity} level"


def bar(label: Label, row: Timing) -> dict[str, Any]:
    """Return the numbers of one bar: a speedup with its quartiles, and the ideal beside it."""
    return {
        "method": label.name,
        "name": method_name(label),
        "gamma": label.gamma,
        "granularity": label.granularity,
        "candidates": label.candidates,
        "speedup": row.speedup.median,
        "low": row.speedup.low,
        "high": row.speedup.high,
        "ideal": row.ideal_rank,
        "reached": row.reached,
        "dropped_share": row.dropped_share,
    }
