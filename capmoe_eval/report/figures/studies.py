"""Benchmark runs of a figure: there, and missing with the command for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, Shown
from capmoe_eval.paper.printed import deployment
from capmoe_eval.report.figures.spec import Measured, Numbers, Sources, Spec, because

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Label, Point, Timing


@dataclass(frozen=True, kw_only=True)
class FigureStudies(Sources):
    """The runs that a figure shows.

    Attributes:
        shown: The runs, in the order of the paper.
    """

    shown: Sequence[Shown]

    def measured(self, panels: Sequence[Numbers], notes: Sequence[str]) -> Measured:
        """Return what a figure shows: its panels, and how their runs were timed."""
        return Measured({**self.names, "panels": panels}, notes)


def gather_study(spec: Spec, bench: Bench, profile: str) -> FigureStudies:
    """Return the runs of a figure; a file that cannot be read is left out and named in a note."""
    shown = bench.best(spec.study) if spec.runs == "best" else bench.fullest(spec.study)
    lacking: Sequence[str] = [] if shown else [spec.study]
    if spec.models:  # any other shape is not of this figure
        names = [found.name if (found := deployment(one.run.model)) else "" for one in shown]
        shown = [one for one, name in zip(shown, names, strict=True) if name in spec.models]
        lacking = [name for name in spec.models if name not in names]
    broken = [f"Left out: {line}." for line in bench.broken_of(spec.study)]
    kinds = {one.kind for one in shown}
    notes = [*broken, *_circumstances(shown), *_others(shown, bench.runs(spec.study))]
    if lacking and shown:
        notes.append(f"No run of {', '.join(lacking)}.")
    return FigureStudies(
        profile=profile,
        planned=len(spec.models) or 1,
        digests=list(dict.fromkeys(one.study.digest for one in shown)),
        nothing=f"no file of study {spec.study} in {bench.folder}{because(broken)}; measure it",
        names={"kind": "partly EMULATED" if len(kinds) == 2 else "".join(kinds)},
        unit="runs",
        n_absent=len(lacking),
        absent=[bench_command(spec.study)] if lacking else [],
        notes=notes,
        shown=shown,
    )


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


def first_point(one: Shown, notes: list[str]) -> Point:
    """Return the point of a run that is shown, its first; note how many others there are."""
    first, *others = one.run.points
    if others:
        noun = "point is" if len(others) == 1 else "points are"
        notes.append(f"{one.run.title}: {len(others)} further {noun} not shown.")
    return first


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


def bar(label: Label, row: Timing) -> Numbers:
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
