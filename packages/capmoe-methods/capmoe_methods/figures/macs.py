"""Points that MACS loses on questions about images, held against γ and against loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired
from capmoe_eval.paper.statistics import interval
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure

from capmoe_methods.figures.losses import by_model, lost, rank_peak
from capmoe_methods.trial import Between, between, paired_between

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_eval.report.figures.evidence import FigureRecords
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
_LOAD_OF: Final[Mapping[str, Callable[[Record], float]]] = {
    "drop_rate": lambda record: record.load.drop_rate,
    "expert_peak": lambda record: record.load.mean_peak_after,
    "rank_peak": lambda record: rank_peak([record]),
}


def losses_and_loads(sources: FigureRecords) -> pd.DataFrame:
    """Return what MACS and Token Drop lose on questions about images, with γ and loads."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for task, title in sources.tasks.items():
        asked = [
            r for r in by_model(sources, *sources.records).get(sources.model, []) if r.task == task
        ]
        stock = next((record for record in asked if record.cell.method.is_stock), None)
        if stock is None:
            sources.notes.append(f"{title}: nothing is drawn without the result that has no limit.")
            continue
        lines: dict[str, list[Record]] = {label: [] for label in _LINES}
        for record in (record for record in asked if not record.cell.method.is_stock):
            label, points = _line(record), lost([stock], [record], [task])
            if isinstance(points, str):
                sources.notes.append(
                    f"{title}: {label}{gamma_suffix(record.gamma)} is left out: {points}."
                )
                continue
            lines[label].append(record)
            loads = {name: load(record) for name, load in _LOAD_OF.items()}
            ends = dict(zip(("lost", "lost_low", "lost_high"), points, strict=True))
            about = {"task": title, "line": label, "gamma": record.gamma or 0.0}
            rows.append(about | loads | ends)
        curve = [stock, *lines[_DROP]]
        sources.notes.extend(
            f"{title}: {label}, γ={gamma_text(record.gamma or 0.0)}, less Token Drop: "
            f"{', '.join(parts)} points."
            for label in _LINES[2:]
            for record in lines[label]
            if (parts := list(_better_by(record, curve)))
        )
    ends = ("lost", "lost_low", "lost_high")
    return pd.DataFrame(rows, columns=["task", "line", *_EQUAL, *ends])


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


def _line(record: Record) -> str:
    """Return the line that a record's point is on."""
    knobs = record.knobs
    if "rho" not in knobs:  # Token Drop
        return _LINES[record.cell.method.modality != "uniform"]
    if knobs["rho"] == 0:
        return _LINES[4]
    return _LINES[2 if knobs["reroute"] == "local" else 3]


def _better_by(record: Record, curve: Sequence[Record]) -> Iterator[str]:
    """Say by how many points a record is better than Token Drop at equal γ and equal loads.

    Token Drop at a load is interpolated between its two neighbouring γ; where no two are around it,
    there is nothing to say.
    """
    drops = curve[1:]  # the stock knows no ranks
    gammas = [other.gamma for other in drops]
    at_gamma = gammas.index(record.gamma) if record.gamma in gammas else None
    same = None if at_gamma is None else Between(at_gamma, at_gamma, 0.0)
    pairs: dict[str, Paired | None] = {"gamma": paired_between(record, drops, same)}
    for name, load in _LOAD_OF.items():
        usable = drops if name == "rank_peak" else curve
        at = between(load(record), [load(other) for other in usable])
        pairs[name] = paired_between(record, usable, at)
    for name, paired in pairs.items():
        if paired is not None:
            effect, low, high = interval({"": 100 * paired.units})
            yield f"{_EQUAL[name][1]} {effect:+.1f} [{low:+.1f}, {high:+.1f}]"
