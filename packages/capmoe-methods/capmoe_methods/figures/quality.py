"""Quality against peak load, and by the company of a batch."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, is_stock, method_title, metric_title
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.scores import over_tasks, whole
from capmoe_eval.report.figures.sources import Sources
from capmoe_eval.routing.registry import method_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEAK: Final = "mean peak load of an expert / mean load"
"""The label of the axis of Pareto fronts."""


def pareto_front(rows: pd.DataFrame, cost: str, quality: str) -> list[bool]:
    """Return of each row whether no other beats it.

    A row is beaten by one that costs no more and is no worse, and differs.
    """
    points = list(zip(rows[cost], rows[quality], strict=True))
    return [
        not any(other != (c, q) and other[0] <= c and other[1] >= q for other in points)
        for c, q in points
    ]


def front(axes: Any, rows: pd.DataFrame, x: str, y: str) -> None:
    """Draw the rows whose ``front`` is true in grey, below the lines of methods."""
    best = rows.loc[rows["front"], [x, y]].sort_values([x, y])
    look = {"color": d.GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round", "zorder": 1}
    d.line(axes, best, x, y, "Pareto front", **look)


def by_peak(sources: Sources) -> pd.DataFrame:
    """Return mean score and mean peak load of each method and γ, and whether it is on the front."""
    cells = sources.cells("baseline", "methods", "at_random")
    cells["method"] = cells["method"].mask(cells["granularity"].eq("device"), "device_drop")
    means = over_tasks(cells, sources.tasks, ["method", "gamma"], peak="load.mean_peak_after")
    rows = whole(
        means, sources.notes, lambda mean: metric_and_title(mean.method) + _at(mean.gamma)
    ).drop(columns="stderr")
    rows = rows.assign(front=pareto_front(rows, "peak", "score"))
    rows = rows.assign(model=sources.title, tasks=len(sources.tasks))
    return rows.sort_values(["method", "peak"], kind="stable")


def _at(gamma: float) -> str:
    return "" if np.isnan(gamma) else gamma_suffix(gamma)


@figure(
    "not in the paper", "Quality against peak load: {model}", by_peak,
    parts=["baseline", "methods", "at_random"],
)  # fmt: skip
def pareto(rows: pd.DataFrame) -> Figure:
    """Mean score against the highest load of an expert over the mean load N̄, mean over batches,
    layers and tasks, for the paper's methods; along a line γ is 1.0, 1.5, 2.0. Grey: the Pareto
    front, on which no other point has both less peak and more score; scores nearby may differ by
    chance. Random is a mean over seeds.
    """
    # Each method looks the same whichever others are there.
    methods = [name for name in method_names() if not is_stock(name)]
    looks = d.looks(methods, linewidth=0.7, markersize=3.6, linestyle="-")
    looks["baseline"] = d.STAR | {"markersize": 7}
    for method in ("expanded_drop", "token_reroute", "device_drop"):
        looks[method]["markerfacecolor"] = "white"
    canvas, ((axes,),) = d.canvas(3.4)
    front(axes, rows, "peak", "score")
    for method, same in d.each(rows, "method"):
        d.line(axes, same, "peak", "score", metric_and_title(method), **looks[method])
    first = rows.iloc[0]
    axes.set(
        title=f"{first['model']}, {first['tasks']} tasks", xlabel=PEAK, ylabel="mean score (%)"
    )
    d.legend(canvas)
    return canvas


def metric_and_title(method: str) -> str:
    """Return a method's printed name, with its name as a selection metric where that is another."""
    title, metric = method_title(method), metric_title(method)
    return title if title == metric else f"{title} ({metric})"


def flips(sources: Sources) -> pd.DataFrame:
    """Return how many answers differ between settings of the batch, and by how much the score.

    Every pair of settings of a method is compared, over batch sizes and over shuffles:
    ``flips_percent`` is the mean over pairs, its ends the lowest and the highest pair.
    """
    rows = []
    for part, dealt in (("batch_sizes", "by length"), ("shuffles", "by length and at random")):
        cells = sources.cells(part)
        sizes = ", ".join(map(str, sorted(cells["batch_size"].astype(int).unique())))
        for method, same in d.each(cells, "method"):
            if rates := _flip_rates(sources, same):
                row: dict[str, Any] = {"dealt": f"{dealt}, batches of {sizes}"}
                row |= {"method": method_title(method), "flips_percent": statistics.fmean(rates)}
                row |= {"flips_percent_low": min(rates), "flips_percent_high": max(rates)}
                spread = 100 * (same["value"].max() - same["value"].min())
                rows.append(row | {"score_range": spread})
    if not rows:
        raise UsageError(
            "companions: no method has two settings with the same documents; measure them: "
            + "; ".join(sources.absent[:2])
        )
    cells = sources.cells("batch_sizes", "shuffles")
    about = {"model": sources.title, "documents": cells["n"].iloc[0], "gamma": cells["gamma"].min()}
    return pd.DataFrame(rows).assign(**about)


def _flip_rates(sources: Sources, cells: pd.DataFrame) -> list[float]:
    """Return the share of answers that differ, in percent, for each pair of settings."""
    documents = sources.results.documents
    documents = documents[documents["cell"].isin(cells["cell"])]
    asked = ["task", "subtask", "asked", "document"]
    answers = documents.pivot_table("correct", asked, "cell", observed=True)
    pairs = [answers[list(both)].dropna(how="all") for both in itertools.combinations(answers, 2)]
    alike = [both for both in pairs if both.notna().all(axis=None)]
    if others := len(pairs) - len(alike):
        title = method_title(cells["method"].iloc[0])
        text = f"{title}: {others} of {len(pairs)} pairs of settings have other documents"
        sources.notes.append(f"{text}, and are not compared.")
    return [100 * float((both.iloc[:, 0] != both.iloc[:, 1]).mean()) for both in alike]


@figure(
    "not in the paper", "How much an answer depends on its batch: {model}", flips,
    parts=["batch_sizes", "shuffles"],
)  # fmt: skip
def companions(rows: pd.DataFrame) -> Figure:
    """Above: share of documents whose answer is right in one setting and wrong in another, mean
    over pairs of settings; whiskers: lowest and highest pair. Below: range of the score. Batches of
    OBQA, PIQA, RTE and BoolQ; dealt by length in four sizes, or of one size by length and at random
    (three seeds), which mixes the tasks.
    """
    canvas, ((upper,), (lower,)) = d.canvas(3.2, 2, 1, sharex=True)
    d.bars(upper, rows, "method", "flips_percent", "dealt")
    d.bars(lower, rows, "method", "score_range", "dealt")
    first = rows.iloc[0]
    gamma = gamma_suffix(first["gamma"], ", γ = ")
    upper.set_title(f"{first['model']}, {first['documents']:,} documents{gamma}")
    upper.set_ylabel("answers that\nflip (%)")
    lower.set_ylabel("score range\n(points)")
    d.name_places(lower, d.places(rows["method"]))
    d.legend(canvas, 1)
    return canvas
