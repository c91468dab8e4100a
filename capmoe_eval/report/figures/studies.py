"""Benchmark runs of a figure: there, and missing with the command for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, ShownRun
from capmoe_eval.paper.printed import deployment
from capmoe_eval.report.figures.catalogue import Sources, Spec, because
from capmoe_eval.report.figures.pooling import by_key

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Label, Point, Timing


class Gain(NamedTuple):
    """The speedup of a method over no capacity."""

    method: str
    method_name: str  # as the paper calls it
    gamma: float | None
    granularity: str
    speedup: float  # median over rounds
    low: float | None  # lowest of repeated runs; None of a single one
    high: float | None
    ideal: float  # what the fullest rank's number of pairs would gain
    reached: float | None  # share of the ideal gain


@dataclass(frozen=True, kw_only=True)
class FigureStudies(Sources):
    """The runs that a figure shows."""

    runs: Sequence[ShownRun]  # in the order of the paper
    there: Sequence[ShownRun]  # all runs of the study

    def first_points(self) -> Iterator[tuple[ShownRun, Point]]:
        """Yield each run with its first point, which is shown; note how many others there are."""
        for run in self.runs:
            first, *others = run.run.points
            if others:
                noun = "point is" if len(others) == 1 else "points are"
                self.notes.append(f"{run.run.title}: {len(others)} further {noun} not shown.")
            yield run, first

    def gains(self, run: ShownRun, part: str = "layer", place: int = 0) -> list[Gain]:
        """Return what each method gains at one point of a run.

        The part is ``layer``, or ``prefill``, which not every point has.
        """
        again = [row for same in repeats(run, self.there) for row in _timings(same, part, place)]
        gains = []
        for row in _timings(run, part, place):
            if row.label is None:
                continue
            medians = [same.speedup.median for same in (row, *again) if same.method == row.method]
            is_repeated = len(medians) > 1
            gains.append(
                Gain(
                    row.label.name,
                    method_name(row.label),
                    row.label.gamma,
                    row.label.granularity,
                    row.speedup.median,
                    min(medians) if is_repeated else None,
                    max(medians) if is_repeated else None,
                    row.ideal_rank,
                    row.reached,
                )
            )
        return gains

    def repetitions(self) -> list[str]:
        """Say of which runs there is a repetition, which whiskers need."""
        repetitions = {run.run.title: repeats(run, self.there) for run in self.runs}
        notes = [
            f"{title}: whiskers over {len(same) + 1} runs, repeated in "
            f"{', '.join(other.study.path.name for other in same)}."
            for title, same in repetitions.items()
            if same
        ]
        if once := [title for title, same in repetitions.items() if not same]:
            notes.append(
                f"One run of {', '.join(once)}: how far a repetition differs is not known, and no "
                "whiskers are drawn."
            )
        return notes


def repeats(run: ShownRun, there: Iterable[ShownRun]) -> list[ShownRun]:
    """Return the runs in other files that repeat one: all is the same, the machine included."""
    others = (other for other in there if other.study is not run.study)
    return [other for other in others if _setting(other) == _setting(run)]


def _setting(study_run: ShownRun) -> tuple[object, ...]:
    study, run = study_run.study, study_run.run
    points = [(point.tokens_per_rank, point.prompt, point.routing) for point in run.points]
    of_file = study.kind, study.scale, study.dtype, study.machine
    return run.title, run.ranks, run.experts_per_rank, points, *of_file


def _timings(run: ShownRun, part: str, place: int) -> Sequence[Timing]:
    point = run.run.points[place]
    if part == "layer":
        return point.timings
    return point.prefill.timings if point.prefill else ()


def gather_study(spec: Spec, bench: Bench, profile: str) -> FigureStudies:
    """Return the runs of a figure; a file that cannot be read is left out and named in a note."""
    runs = bench.best(spec.study) if spec.runs == "best" else bench.fullest(spec.study)
    lacking: Sequence[str] = [] if runs else [spec.study]
    if spec.models:  # any other shape is not of this figure
        names = [shape.name if (shape := deployment(run.run.model)) else "" for run in runs]
        runs = [run for run, name in zip(runs, names, strict=True) if name in spec.models]
        lacking = [name for name in spec.models if name not in names]
    broken = [f"Left out: {line}." for line in bench.broken_of(spec.study)]
    kinds = {run.kind for run in runs}
    there = bench.runs(spec.study)
    notes = [*broken, *_circumstances(runs), *_others(runs, there)]
    if lacking and runs:
        notes.append(f"No run of {', '.join(lacking)}.")
    return FigureStudies(
        profile=profile,
        planned=len(spec.models) or 1,
        digests=list(dict.fromkeys(run.study.digest for run in runs)),
        nothing=f"no file of study {spec.study} in {bench.folder}{because(broken)}; measure it",
        names={"kind": "partly EMULATED" if len(kinds) == 2 else "".join(kinds)},
        unit="runs",
        n_absent=len(lacking),
        absent=[bench_command(spec.study)] if lacking else [],
        notes=notes,
        runs=runs,
        there=there,
    )


def _circumstances(runs: Iterable[ShownRun]) -> list[str]:
    """Return what must be said of emulations, sizes, routing and machines, each once."""
    notes = [f"{run.study.note}." for run in runs if run.study.note]
    for run in runs:
        if run.study.why:
            notes.append(f"Sizes: {run.study.why.rstrip('.')}.")
        if run.run.why:
            notes.append(f"Routing of {run.run.title}: {run.run.why.rstrip('.')}.")
        if run.run.link:
            # What follows the semicolon is of this one run, and in the numbers.
            source = run.run.link.source.partition("; ")[0]
            notes.append(f"The emulated exchange: {source}.")
        notes.append(
            f"{run.study.path.name}: {run.study.machine}; {run.study.dtype}, median "
            f"of {run.study.repeats} rounds, {run.study.date[:10]}."
        )
    return list(dict.fromkeys(notes))


def _others(runs: Sequence[ShownRun], there: Sequence[ShownRun]) -> list[str]:
    """Say which runs of the study are neither shown nor repeat one, a line for each file."""
    used = [*runs, *(same for run in runs for same in repeats(run, there))]
    others = [run for run in there if run not in used]
    files = by_key(others, lambda run: f"{run.study.path.name} ({run.kind})")
    return [
        f"Not shown, from {name}: {', '.join(f'{run.run.title} on {run.ranks}' for run in same)}."
        for name, same in files.items()
    ]


def method_name(label: Label) -> str:
    """Return a method as the paper calls it, with what is unusual about it."""
    name = method_title(label.name)
    if label.candidates != "local":
        name += f" ({label.candidates})"
    return name if label.granularity == "expert" else f"{name}, {label.granularity} level"
