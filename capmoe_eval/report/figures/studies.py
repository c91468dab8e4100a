"""Benchmark runs of a figure: there, and missing with the command for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, ShownRun
from capmoe_eval.paper.printed import deployment
from capmoe_eval.report.figures.catalogue import Sources, Spec, because

if TYPE_CHECKING:
    import pandas as pd

    from capmoe_eval.experiment.timings.schema import Label, Timing

DROPLESS = "Dropless"


@dataclass(frozen=True, kw_only=True)
class FigureStudies(Sources):
    """The runs that a figure shows."""

    runs: Sequence[ShownRun]  # in the order of the paper
    there: Sequence[ShownRun]  # all runs of the study

    @functools.cached_property
    def timings(self) -> pd.DataFrame:
        """The times of the runs: a row for each point, part and method, dropless included.

        ``part`` is a layer or a prefill, ``point`` counts from 0. ``speedup`` is the median over
        rounds, ``speedup_low`` and ``speedup_high`` are the ends over repeated runs, if there are
        some. ``ideal`` is what the fullest rank's number of pairs would gain, ``reached`` the share
        of that gain; ``seconds`` has the times of the phases.
        """
        import pandas as pd

        rows = []
        for run in self.runs:
            again = [dict(_timings(other)) for other in repeats(run, self.there)]
            for key, row in _timings(run):
                routing, label = run.run.points[key[0]].routing, row.label
                medians = [o[key].speedup.median for o in again if key in o]
                spread = [row.speedup.median, *medians] if medians else []
                rows.append(
                    {
                        "key": run.run.model,
                        "model": run.run.title,
                        "measured": run.kind,
                        "ranks": run.run.ranks,
                        "experts_per_rank": run.run.experts_per_rank,
                        "scale": run.study.scale,
                        "peak": routing.peak,
                        "together": routing.together,
                        "point": key[0],
                        "part": key[1],
                        "method": label.name if label else DROPLESS,
                        "method_name": method_name(label) if label else DROPLESS,
                        "gamma": label.gamma if label else None,
                        "granularity": label.granularity if label else None,
                        "speedup": row.speedup.median,
                        "speedup_low": min(spread, default=None),
                        "speedup_high": max(spread, default=None),
                        "ideal": row.ideal_rank,
                        "reached": row.reached,
                        "seconds": row.seconds,
                    }
                )
        numbers = dict.fromkeys(("gamma", "speedup_low", "speedup_high", "reached"), float)
        return pd.DataFrame(rows).astype(numbers)

    def note_repetitions(self) -> None:
        """Note of which runs there is a repetition, which whiskers need."""
        files = {
            run.run.title: [other.study.path.name for other in repeats(run, self.there)]
            for run in self.runs
        }
        for title, names in files.items():
            if names:
                text = f"{title}: whiskers over {len(names) + 1} runs"
                self.notes.append(f"{text}, repeated in {', '.join(names)}.")
        if once := [title for title, names in files.items() if not names]:
            self.notes.append(
                f"One run of {', '.join(once)}: how far a repetition differs is not known, and no "
                "whiskers are drawn."
            )


def _timings(run: ShownRun) -> Iterator[tuple[tuple[int, str, str], Timing]]:
    """Yield the rows of a run, by the place of its point, the part and the method."""
    for place, point in enumerate(run.run.points):
        parts = {"layer": point.timings, "prefill": point.prefill.timings if point.prefill else ()}
        for part, rows in parts.items():
            yield from (((place, part, row.method), row) for row in rows)


def repeats(run: ShownRun, there: Iterable[ShownRun]) -> list[ShownRun]:
    """Return the runs in other files that repeat one: all is the same, the machine included."""
    others = (other for other in there if other.study is not run.study)
    return [other for other in others if _setting(other) == _setting(run)]


def _setting(study_run: ShownRun) -> tuple[object, ...]:
    study, run = study_run.study, study_run.run
    points = [(point.tokens_per_rank, point.prompt, point.routing) for point in run.points]
    of_file = study.kind, study.scale, study.dtype, study.machine
    return run.title, run.ranks, run.experts_per_rank, points, *of_file


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


def _circumstances(runs: Iterable[ShownRun]) -> Iterator[str]:
    """Yield what must be said of emulations, sizes, routing and machines."""
    for of_run in runs:
        study, run = of_run.study, of_run.run
        if study.note:
            yield f"{study.note}."
        if study.why:
            yield f"Sizes: {study.why.rstrip('.')}."
        if run.why:
            yield f"Routing of {run.title}: {run.why.rstrip('.')}."
        if run.link:
            # What follows the semicolon is of this one run, and in the numbers.
            yield f"The emulated exchange: {run.link.source.partition('; ')[0]}."
        yield (
            f"{study.path.name}: {study.machine}; {study.dtype}, median of {study.repeats} rounds, "
            f"{study.date[:10]}."
        )


def _others(runs: Sequence[ShownRun], there: Sequence[ShownRun]) -> list[str]:
    """Say which runs of the study are neither shown nor repeat one, a line for each file."""
    used = [*runs, *(same for run in runs for same in repeats(run, there))]
    files: dict[str, list[str]] = {}
    for run in there:
        if run not in used:
            name = f"{run.study.path.name} ({run.kind})"
            files.setdefault(name, []).append(f"{run.run.title} on {run.ranks}")
    return [f"Not shown, from {name}: {', '.join(runs)}." for name, runs in files.items()]


def method_name(label: Label) -> str:
    """Return a method as the paper calls it, with what is unusual about it."""
    name = method_title(label.name)
    if label.candidates != "local":
        name += f" ({label.candidates})"
    return name if label.granularity == "expert" else f"{name}, {label.granularity} level"
