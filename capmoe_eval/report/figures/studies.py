"""Benchmark runs of a figure: there, and missing with the command for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, Shown
from capmoe_eval.paper.printed import deployment
from capmoe_eval.report.figures.catalogue import Measured, Numbers, Sources, Spec, because
from capmoe_eval.report.figures.pooling import by_key

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Label, Point, Timing


@dataclass(frozen=True, kw_only=True)
class FigureStudies(Sources):
    """The runs that a figure shows."""

    shown: Sequence[Shown]  # in the order of the paper
    there: Sequence[Shown]  # all runs of the study

    def first_points(self, notes: list[str]) -> Iterator[tuple[Shown, Point]]:
        """Yield each run with its first point, which is shown; note how many others there are."""
        for one in self.shown:
            first, *others = one.run.points
            if others:
                noun = "point is" if len(others) == 1 else "points are"
                notes.append(f"{one.run.title}: {len(others)} further {noun} not shown.")
            yield one, first

    def bars(self, one: Shown, part: str = "layer", place: int = 0) -> list[Numbers]:
        """Return the bars of one point of a run: each method's speedup, its range, the ideal.

        The part is ``layer``, or ``prefill``, of which a point without one has no bars.
        """
        again = [row for same in repeats(one, self.there) for row in _timings(same, part, place)]
        bars = []
        for row in _timings(one, part, place):
            if row.label is None:
                continue
            medians = [same.speedup.median for same in (row, *again) if same.method == row.method]
            repeated = len(medians) > 1
            bars.append(
                {
                    "method": row.label.name,
                    "name": method_name(row.label),
                    "gamma": row.label.gamma,
                    "granularity": row.label.granularity,
                    "candidates": row.label.candidates,
                    "speedup": row.speedup.median,
                    "low": min(medians) if repeated else None,
                    "high": max(medians) if repeated else None,
                    "ideal": row.ideal_rank,
                    "reached": row.reached,
                    "dropped_share": row.load.dropped_share,
                }
            )
        return bars

    def repetitions(self) -> list[str]:
        """Say of which runs there is a repetition, which whiskers need."""
        found = {one.run.title: repeats(one, self.there) for one in self.shown}
        notes = [
            f"{title}: whiskers over {len(same) + 1} runs, repeated in "
            f"{', '.join(other.study.path.name for other in same)}."
            for title, same in found.items()
            if same
        ]
        if once := [title for title, same in found.items() if not same]:
            notes.append(
                f"One run of {', '.join(once)}: how far a repetition differs is not known, and no "
                "whiskers are drawn."
            )
        return notes

    def measured(self, panels: Sequence[Numbers], notes: Sequence[str]) -> Measured:
        """Return what a figure shows: its panels, and how their runs were timed."""
        return Measured({**self.names, "panels": panels}, notes)


def repeats(one: Shown, there: Iterable[Shown]) -> list[Shown]:
    """Return the runs in other files that repeat one: all is the same, the machine included."""
    others = (other for other in there if other.study is not one.study)
    return [other for other in others if _setting(other) == _setting(one)]


def _setting(one: Shown) -> tuple[object, ...]:
    study, run = one.study, one.run
    points = [(point.tokens_per_rank, point.prompt, point.routing) for point in run.points]
    of_file = study.kind, study.scale, study.dtype, study.machine
    return run.title, run.ranks, run.experts_per_rank, points, *of_file


def _timings(one: Shown, part: str, place: int) -> Sequence[Timing]:
    point = one.run.points[place]
    if part == "layer":
        return point.timings
    return point.prefill.timings if point.prefill else ()


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
    there = bench.runs(spec.study)
    notes = [*broken, *_circumstances(shown), *_others(shown, there)]
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
        there=there,
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
            f"{one.study.path.name}: {one.study.machine}; {one.study.dtype}, median "
            f"of {one.study.repeats} rounds, {one.study.date[:10]}."
        )
    return list(dict.fromkeys(notes))


def _others(shown: Sequence[Shown], there: Sequence[Shown]) -> list[str]:
    """Say which runs of the study are neither shown nor repeat one, a line for each file."""
    used = [*shown, *(same for one in shown for same in repeats(one, there))]
    others = [one for one in there if one not in used]
    files = by_key(others, lambda one: f"{one.study.path.name} ({one.kind})")
    return [
        f"Not shown, from {name}: {', '.join(f'{one.run.title} on {one.ranks}' for one in runs)}."
        for name, runs in files.items()
    ]


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


def method_name(label: Label) -> str:
    """Return a method as the paper calls it, with what is unusual about it."""
    name = method_title(label.name)
    if label.candidates != "local":
        name += f" ({label.candidates})"
    return name if label.granularity == "expert" else f"{name}, {label.granularity} level"
