"""All results of a directory against γ: score, drop rate and fullest expert, of any sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import BITS_PER_BYTE, is_stock, method_title
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import Sources, Spec
from capmoe_eval.report.figures.scores import over_tasks, with_interval
from capmoe_eval.results.frames import IDENTITY, read

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SCORE: Final = "score (%)"
_BITS: Final = "bits per byte"
_LOADS: Final = {
    "dropped_percent": "dropped pairs (%)",
    "straggler": "fullest expert / mean load",
}
# Told apart by a line's name and place: all else in which two cells differ is in its name.
_NAMED: Final = ("method", "gamma", "seed")


@dataclass(frozen=True, kw_only=True)
class SweepResults(Sources):
    """The cells of a directory."""

    cells: pd.DataFrame


def gather_sweep(directory: Path) -> SweepResults:
    """Return the results of a directory; UsageError if there is none in it."""
    cells = read(directory).cells
    return SweepResults(
        profile=directory.resolve().name,
        planned=len(cells),
        digests=list(cells["cell"]),
        names={"directory": str(directory)},
        cells=cells,
    )


def by_gamma(sources: SweepResults) -> pd.DataFrame:
    """Return score, drops and fullest expert by γ: a row for each model, unit, setting and γ.

    Tasks of a model and unit count equally. Without a limit γ is missing.
    """
    import pandas as pd

    cells = sources.cells.assign(gamma=pd.to_numeric(sources.cells["gamma"], errors="coerce"))
    cells["dropped_percent"] = 100 * cells["drop_rate"].astype(float)
    cells["straggler"] = cells["load.mean_peak_after"].astype(float)
    cells["line"] = _names(cells)
    is_text = cells["task.metric"] == BITS_PER_BYTE
    cells["unit"] = is_text.map({True: _BITS, False: _SCORE})
    without = cells["gamma"].isna() & ~cells["method"].map(is_stock)
    if without.any():
        methods = ", ".join(map(method_title, cells["method"][without].unique()))
        sources.notes.append(f"Cells without one γ are not drawn: {methods}.")
    if without.all():
        raise UsageError(f"{sources.names['directory']}: has no cell with one γ; nothing is drawn")
    rows = []
    for (model, unit), same in cells[~without].groupby(["model", "unit"], sort=False):
        tasks = list(dict.fromkeys(same["task"]))
        about = {"model": model, "unit": unit, "tasks": ", ".join(tasks)}
        loads = dict(zip(_LOADS, _LOADS, strict=True))
        for mean in over_tasks(same, tasks, ["line", "gamma"], **loads):
            if lacking := mean.pop("lacking"):
                name, gamma = mean["line"], mean["gamma"]
                sources.notes.append(
                    f"{model}, {name}, γ={gamma:g} is left out: no result of {', '.join(lacking)}."
                )
                continue
            if unit == _BITS:
                mean |= {name: mean[name] / 100 for name in ("score", "stderr")}
            rows.append(about | mean)
    columns = ["model", "unit", "tasks", "line", "gamma", "score", "stderr", *_LOADS]
    frame = with_interval(pd.DataFrame(rows, columns=columns), "score")
    return frame.sort_values(["model", "unit", "line", "gamma"], kind="stable")


def _names(cells: pd.DataFrame) -> pd.Series[str]:
    """Return the name of each cell's line: its method, and what else tells cells of it apart."""
    names = cells["method"].map(method_title)
    same = [cells[name] for name in ("model", "task", "method")]
    for column in IDENTITY:
        if column in _NAMED or column.split(".")[0] in ("model", "task"):
            continue
        values = cells[column].map(str)
        is_several = values.groupby(same).transform("nunique") > 1
        names = names.mask(is_several, names + f", {column}=" + values)
    return names


def draw(rows: pd.DataFrame) -> Figure:
    """Score against the capacity factor γ, with the share of pairs that are dropped and the highest
    load of an expert over the mean load before drops (the straggler factor; mean over batches and
    layers). A line for each setting; seeds are averaged. Tasks of one unit count equally; their
    names are in the data. Whiskers: 95 % intervals over documents, of each point by itself. Dotted:
    without a limit. Of bits per byte fewer are better.
    """
    panels = list(rows.groupby(["model", "unit"], sort=False))
    columns = len(_LOADS) + 1
    canvas, grid = d.canvas(d.PAGE, 1.9 * len(panels) + 0.6, len(panels), columns)
    lines = d.places(rows["line"][rows["gamma"].notna()])
    for ((model, unit), same), row in zip(panels, grid, strict=True):
        labels = {"score": unit} | _LOADS
        for (column, label), axes in zip(labels.items(), row, strict=True):
            limited = same.dropna(subset="gamma")
            for line, of_line in d.each(limited, "line"):
                d.line(axes, of_line, "gamma", column, line, **_look(lines[line]))
            for value in same.loc[same["gamma"].isna(), column]:
                d.rule(axes, value, ":", 1.0, "without a limit")
            d.gamma_axis(axes, limited["gamma"])
            axes.set_ylabel(label)
        row[0].set_title(f"{model}: {_count(same['tasks'].iloc[0])}")
    d.legend(canvas, 2)
    return canvas


def _look(place: int) -> d.Look:
    return d.line_look(place, markersize=3, linewidth=0.8)


def _count(tasks: str) -> str:
    return tasks if tasks.count(",") < 3 else f"{tasks.count(',') + 1} tasks"


SWEEP: Final[Any] = Spec(
    name="sweep",
    place="",
    title="Score, drops and fullest expert by γ: {directory}",
    caption=" ".join((draw.__doc__ or "").split()),
    data=by_gamma,
    draw=draw,
)
"""The figure of a directory, which is none of a name."""
