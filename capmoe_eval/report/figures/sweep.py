"""All results of a directory against γ: score, drop rate and fullest expert, of any sweep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import (
    BITS_PER_BYTE,
    gamma_suffix,
    is_share,
    is_stock,
    method_title,
)
from capmoe_eval.experiment.results import report_folder
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import Spec
from capmoe_eval.report.figures.scores import over_tasks, whole, with_interval
from capmoe_eval.report.figures.sources import Sources
from capmoe_eval.report.tables.sweep import settings_of, share_interval
from capmoe_eval.results.frames import read

_SHARE: Final = "score (%)"  # the unit of scores that are shares; others have that of their metric
_LOADS: Final = {
    "dropped_percent": "dropped pairs (%)",
    "straggler": "fullest expert / mean load",
}


def sweep_figure(directory: Path) -> Spec:
    """Return the figure of all results of a directory, which is none of a name."""
    return Spec(
        name="sweep",
        place="",
        title="Score, drops and fullest expert by γ: {directory}",
        caption=" ".join((draw.__doc__ or "").split()),
        data=by_gamma,
        draw=draw,
        gather=lambda *_: _gather(directory),
        folder=report_folder(directory),
    )


def _gather(directory: Path) -> Sources:
    """Return the results of a directory; UsageError if there is none in it."""
    results = read(directory)
    return Sources(
        profile=directory.resolve().name,
        planned=len(results.cells),
        digests=list(results.cells["cell"]),
        names={"directory": str(directory)},
        frames=lambda: results,
    )


def by_gamma(sources: Sources) -> pd.DataFrame:
    """Return score, drops and fullest expert by γ: a row for each model, unit, setting and γ.

    The tasks by which most of a model are drawn count equally. Without a limit γ is missing.
    """
    cells, (settings, notes) = sources.results.cells, settings_of(sources.results)
    sources.notes.extend(notes)
    units = cells["task.metric"].replace(BITS_PER_BYTE, "bits per byte")
    cells = cells.assign(
        dropped_percent=100 * cells["drop_rate"],
        straggler=cells["load.mean_peak_after"],
        line=cells["method"].map(method_title) + (", " + settings).replace(", ", ""),
        unit=units.mask(cells["task.metric"].map(is_share), _SHARE),
    )
    without = cells["gamma"].isna() & ~cells["method"].map(is_stock)
    if without.any():
        methods = ", ".join(map(method_title, cells["method"][without].unique()))
        sources.notes.append(f"Cells without one γ are not drawn: {methods}.")
    if without.all():
        raise UsageError(f"{sources.names['directory']}: has no cell with one γ; nothing is drawn")
    parts = []
    for (model, unit), same in d.each(cells[~without], ["model", "unit"]):
        settings = same.groupby(["line", "gamma"], dropna=False)["task"].agg(frozenset)
        drawn = max(settings, key=lambda of: len(of) * sum(of <= other for other in settings))
        tasks = {task: task for task in same["task"] if task in drawn}
        if fewer := ", ".join(dict.fromkeys(task for task in same["task"] if task not in drawn)):
            sources.notes.append(f"Left out of {model}, as few settings have them: {fewer}.")
        loads = {name: name for name in (*_LOADS, "n")}
        means = over_tasks(same[same["task"].isin(drawn)], tasks, ["line", "gamma"], **loads)
        means = means.assign(model=model, unit=unit, tasks=", ".join(tasks))
        means = whole(means, sources.notes, _named)
        means[["score", "stderr"]] /= 100
        if unit == _SHARE:
            columns = (means["score"], means["stderr"], means["n"] * len(tasks))
            ends = [share_interval(*map(float, row)) for row in zip(*columns, strict=True)]
            means[["score_low", "score_high"]] = 100 * np.array(ends)
            means["score"] *= 100
        else:
            means = with_interval(means, "score")
        parts.append(means)
    rows = pd.concat(parts).drop(columns=["n", "stderr"], errors="ignore")
    return rows.sort_values(["model", "unit", "line", "gamma"], kind="stable")


def _named(row: Any) -> str:
    gamma = "" if math.isnan(row.gamma) else gamma_suffix(row.gamma, " at γ=")
    return f"{row.line} of {row.model}{gamma}"


def draw(rows: pd.DataFrame) -> d.Figure:
    """Score against the capacity factor γ, with the share of pairs that are dropped and the highest
    load of an expert over the mean load before drops (the straggler factor; mean over batches and
    layers). A line for each setting; seeds are averaged. Tasks of one unit count equally:
    those by which most results are drawn; their names are in the data. Whiskers: 95 % intervals
    over documents, of each point by itself. Dotted: without a limit. Of bits per byte fewer are
    better.
    """
    models = list(d.each(rows, ["model", "unit"]))
    looks = d.looks(rows["line"][rows["gamma"].notna()], markersize=3, linewidth=0.8)
    canvas, grid = d.canvas(5.0 * len(models) + 0.3, 3 * len(models), 1)
    for number, ((model, unit), same) in enumerate(models):
        panels = grid[3 * number : 3 * number + 3, 0]
        limited = same.dropna(subset="gamma")
        labels = {"score": unit} | _LOADS
        for (column, label), axes in zip(labels.items(), panels, strict=True):
            d.lines(axes, limited, "gamma", column, "line", looks)
            for value in same.loc[same["gamma"].isna(), column]:
                d.rule(axes, value, ":", 1.0, "without a limit")
            d.gamma_axis(axes, limited["gamma"])
            axes.set_ylabel(label)
        tasks = same["tasks"].iloc[0]
        count = tasks.count(",") + 1
        panels[0].set_title(f"{model}: {tasks if count < 4 else f'{count} tasks'}")
    d.legend(canvas, 1)
    return canvas
