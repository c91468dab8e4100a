"""Points that MACS loses on questions about images, held against γ and against loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import gamma_suffix, gamma_text, is_stock, method_title
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.sources import Sources
from capmoe_eval.results.frames import Results

from capmoe_methods.comparison import interval, nearness, paired_between, peaks
from capmoe_methods.figures.comparators import LOST, losses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DROP, _MACS = map(method_title, ("score", "macs"))
_LINES: Final = (
    _DROP,
    f"{_DROP}, images first",
    _MACS,
    f"{_MACS} without rerouting",
    f"{_MACS}, ρ=0",
)
_EQUAL: Final = {
    "gamma": ("capacity factor γ", "at equal γ"),
    "drop_rate": ("dropped share of own pairs", "at equal drops"),
    "expert_peak": ("fullest expert / mean load", "at an equally full expert"),
    "rank_peak": ("fullest rank / mean load", "at an equally full rank"),
}


def losses_and_loads(sources: Sources) -> pd.DataFrame:
    """Return what MACS and Token Drop lose on questions about images, with γ and loads."""
    results = sources.results
    lines = _lines(results.cells)
    cells = results.cells.assign(
        expert_peak=results.cells["load.mean_peak_after"].astype(float),
        rank_peak=peaks(results, "device"),
        line=lines,
        name=lines + results.cells["gamma"].map(gamma_suffix),
    )
    rows: list[dict[str, Any]] = []
    for task, title in sources.tasks.items():
        asked = cells[(cells["model"] == sources.model) & (cells["task"] == task)]
        is_limited = ~asked["method"].map(is_stock)
        stock, limited = asked[~is_limited][:1], asked[is_limited]
        if stock.empty:
            sources.notes.append(f"{title}: nothing is drawn without the result that has no limit.")
            continue
        points = list(losses(sources, stock, limited, [task], title))
        for cell, ends in points:
            rows.append({"task": title} | cell.iloc[0][["line", *_EQUAL]].to_dict() | ends)
        is_there = limited["cell"].isin([cell["cell"].iloc[0] for cell, _ in points])
        drops = limited[is_there & (limited["line"] == _DROP)]
        for label in _LINES[2:]:
            for cell, _ in points:
                if label == cell["line"].iloc[0] and (
                    parts := list(_more_than_drop(results, cell, stock, drops))
                ):
                    name = f"{title}: {label}, γ={gamma_text(cell['gamma'].iloc[0])}, points lost"
                    sources.notes.append(f"{name} less Token Drop's: {', '.join(parts)}.")
    return pd.DataFrame(rows, columns=["task", "line", *_EQUAL, *LOST])


@figure(
    "not in the paper",
    "Points lost on questions about images, MACS beside Token Drop: {model}",
    losses_and_loads,
    experiment="images_macs",
    parts=(
        *("stock", "drop", "image_first", "macs", "macs_without_rerouting"),
        *("macs_without_modalities", "drop_mmbench", "image_first_mmbench", "macs_mmbench"),
    ),
)
def images_macs(rows: pd.DataFrame) -> Figure:
    """Right answers lost against no limit, in points, paired by document, with 95 % intervals over
    images; below 0 it gains. The same settings in every row: against γ, on which a method of
    other weights means another load; against the share of tokens' own pairs that are dropped (a
    pair of MACS that is rerouted counts as dropped); and against the highest load of an expert, and
    of a rank, over the mean load before any drop, means over batches and layers. Along a line γ
    grows. MACS bounds weights: its experts may have more tokens than γ times the mean load; with
    ρ=0 the capacities of visual, textual and shared experts are equal.
    """
    tasks = d.places(rows["task"]) or {"": 0}
    layout = {"sharey": "col", "sharex": "row"}
    canvas, grid = d.canvas(1.6 * len(_EQUAL) + 0.6, len(_EQUAL), len(tasks), **layout)
    for task, place in tasks.items():
        for load, axes in zip(_EQUAL, grid[:, place], strict=True):
            if load != "drop_rate":
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter("{x:g}")
            for index, label in enumerate(_LINES):
                same = rows[(rows["task"] == task) & (rows["line"] == label)]
                look = d.line_look(index, markersize=3.5, linewidth=0.8, **d.THIN)
                d.line(axes, same.sort_values([load, "gamma"]), load, "lost", label, **look)
            d.rule(axes, 0)
            axes.set(xlabel=_EQUAL[load][0], ylabel="points lost")
        grid[0][place].set_title(task)
    d.legend(canvas)
    return canvas


def _lines(cells: pd.DataFrame) -> pd.Series[str]:
    """Return the line that each cell's point is on."""
    has_first = cells["modality"].isin(["image_first", "text_first"])
    lines = has_first.map({False: _LINES[0], True: _LINES[1]})
    lines = lines.mask(cells["rho"].notna(), _LINES[2])
    lines = lines.mask(cells["reroute"] == "none", _LINES[3])
    return lines.mask(cells["rho"] == 0, _LINES[4])


def _more_than_drop(
    results: Results, cell: pd.DataFrame, stock: pd.DataFrame, drops: pd.DataFrame
) -> Iterator[str]:
    """Say how many points more than Token Drop a cell loses at equal γ and equal loads.

    Token Drop at a load is interpolated between its two neighbouring γ; where no two are around it,
    there is nothing to say.
    """
    curve = pd.concat([stock, drops])
    for name, (_, words) in _EQUAL.items():
        # The stock knows neither γ nor ranks.
        points = drops if name in ("gamma", "rank_peak") else curve
        (value,), values = cell[name], points[name].to_numpy(float)
        if name == "gamma" and value not in values:
            continue
        paired = paired_between(results, cell, points, nearness(value, values))
        if paired is not None:
            # The task seeds the draws, so that a page has the same interval.
            effect, low, high = interval({cell["task"].iloc[0]: 0.0 - 100 * paired.units})
            yield f"{words} {effect:+.1f} [{low:+.1f}, {high:+.1f}]"
