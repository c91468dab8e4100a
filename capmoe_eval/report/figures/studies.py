"""Benchmark runs of a figure: there, and missing with the command for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import method_title
from capmoe_eval.paper.benchmarks import RUN, Bench, kind_text, ranks_text
from capmoe_eval.paper.printed import deployment
from capmoe_eval.report.figures.catalogue import Sources, Spec, because
from capmoe_eval.results.timings import DROPLESS as TIMED_DROPLESS
from capmoe_eval.results.timings import bench_command

if TYPE_CHECKING:
    import pandas as pd

DROPLESS = "Dropless"


@dataclass(frozen=True, kw_only=True)
class FigureStudies(Sources):
    """The runs that a figure shows."""

    times: pd.DataFrame  # of these runs, in the order of the paper
    there: pd.DataFrame  # of all runs of the study

    @functools.cached_property
    def phases(self) -> pd.DataFrame:
        """The times of the runs: a row for each point, part, method and phase, dropless included.

        ``method_name`` is as the paper calls it. ``speedup`` is the median over rounds,
        ``speedup_low`` and ``speedup_high`` are the ends over repeated runs, if there are some.
        """
        names = {
            key: method_name(same.iloc[0]) for key, same in self.times.groupby("label", sort=False)
        }
        keys = ["point", "part", "label"]
        again = repeats(self.times, self.there)
        again = again[again["phase"] == "total"]
        spread = again.groupby(["setting", *keys])["speedup"].agg(["min", "max"]).reset_index()
        rows = self.times.merge(spread, "left", ["setting", *keys])
        is_dropless = rows["method"] == TIMED_DROPLESS
        return rows.assign(
            measured=rows["kind"].map(kind_text),
            method=rows["method"].mask(is_dropless, DROPLESS),
            method_name=rows["label"].map(names),
            speedup_low=rows["min"].clip(upper=rows["speedup"]),
            speedup_high=rows["max"].clip(lower=rows["speedup"]),
        )

    @functools.cached_property
    def timings(self) -> pd.DataFrame:
        """The times of the runs: a row for each point, part and method, dropless included."""
        return self.phases.loc[self.phases["phase"] == "total", [*RUN, *_COLUMNS]]

    def note_repetitions(self) -> None:
        """Note of which runs there is a repetition, which whiskers need."""
        again = repeats(self.times, self.there)
        once: list[str] = []
        for (_, _, title), run in self.times.groupby([*RUN, "model"], sort=False):
            same = again[again["setting"] == run["setting"].iloc[0]].drop_duplicates(RUN)
            if same.empty:
                once.append(str(title))
            else:
                text = f"{title}: whiskers over {len(same) + 1} runs"
                names = ", ".join(Path(path).name for path in same["path"])
                self.notes.append(f"{text}, repeated in {names}.")
        if once:
            self.notes.append(
                f"One run of {', '.join(once)}: how far a repetition differs is not known, and no "
                "whiskers are drawn."
            )


_COLUMNS: Final = [
    *("key", "model", "measured", "ranks", "experts_per_rank", "scale", "peak", "together"),
    *("point", "part", "method", "method_name", "gamma", "granularity", "speedup"),
    *("speedup_low", "speedup_high", "ideal", "reached"),
]


def repeats(times: pd.DataFrame, there: pd.DataFrame) -> pd.DataFrame:
    """Return the times in other files that repeat runs: all is the same, the machine included."""
    runs = times.drop_duplicates("setting")[["setting", "path"]]
    same = there.merge(runs.rename(columns={"path": "repeated"}), on="setting")
    return same[same["path"] != same["repeated"]]


def gather_study(spec: Spec, bench: Bench, profile: str) -> FigureStudies:
    """Return the runs of a figure; a file that cannot be read is left out and named in a note."""
    times = bench.best(spec.study) if spec.runs == "best" else bench.fullest(spec.study)
    lacking: Sequence[str] = [spec.study] if times.empty else []
    if spec.models:  # any other shape is not of this figure
        keys = {key: deployment(key) for key in times["key"].unique()}
        names = {key: shape.name for key, shape in keys.items() if shape}
        times = times[times["key"].map(names).isin(spec.models)]
        lacking = [name for name in spec.models if name not in names.values()]
    broken = [f"Left out: {line}." for line in bench.broken_of(spec.study)]
    kinds = {kind_text(kind) for kind in times["kind"]}
    there = bench.times(spec.study)
    notes = [*broken, *_circumstances(times), *_others(times, there)]
    if lacking and len(times):
        notes.append(f"No run of {', '.join(lacking)}.")
    return FigureStudies(
        profile=profile,
        planned=len(spec.models) or 1,
        digests=list(times["digest"].unique()),
        nothing=f"no file of study {spec.study} in {bench.folder}{because(broken)}; measure it",
        names={"kind": "partly EMULATED" if len(kinds) == 2 else "".join(kinds)},
        unit="runs",
        n_absent=len(lacking),
        absent=[bench_command(spec.study)] if lacking else [],
        notes=notes,
        times=times,
        there=there,
    )


def _circumstances(times: pd.DataFrame) -> Iterator[str]:
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


def _others(times: pd.DataFrame, there: pd.DataFrame) -> list[str]:
    """Say which runs of the study are neither shown nor repeat one, a line for each file."""
    used = {run for part in (times, repeats(times, there)) for run in part.groupby(RUN).groups}
    files: dict[str, list[str]] = {}
    for _, run in there.drop_duplicates(RUN).iterrows():
        if (run["path"], run["run"]) not in used:
            name = f"{Path(run['path']).name} ({kind_text(run['kind'])})"
            files.setdefault(name, []).append(f"{run['model']} on {ranks_text(run)}")
    return [f"Not shown, from {name}: {', '.join(runs)}." for name, runs in files.items()]


def method_name(row: pd.Series[Any]) -> str:
    """Return a method as the paper calls it, with what is unusual about it."""
    if row["method"] == TIMED_DROPLESS:
        return DROPLESS
    name = method_title(row["method"])
    if row["candidates"] != "local":
        name += f" ({row['candidates']})"
    return name if row["granularity"] == "expert" else f"{name}, {row['granularity']} level"
