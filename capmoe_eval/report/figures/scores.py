"""Mean scores by γ (Figure 12), by rounds (Figure 7 of v1), by peak load, and by batches."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import (
    gamma_suffix,
    gamma_text,
    is_stock,
    method_title,
    metric_title,
)
from capmoe_eval.paper.pairing import Paired, Unpaired, answered_by_cells, pair
from capmoe_eval.paper.printed import published_note, table1_scores
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.routing.registry import method_names

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from capmoe_eval.report.figures.evidence import FigureRecords

# Each method looks the same whichever others are there.
LOOKS: Final = {
    method: d.line_look(index, linewidth=0.7, markersize=3.6) | {"linestyle": "-"}
    for index, method in enumerate(name for name in method_names() if not is_stock(name))
}
for _method in ("expanded_drop", "token_reroute", "device_drop"):
    LOOKS[_method]["markerfacecolor"] = "white"
LOOKS["baseline"] = {"color": d.BLACK, "linestyle": "", "marker": "*", "markersize": 7}
PEAK: Final = "mean peak load of an expert / mean load"
"""The label of the axis of Pareto fronts."""
_MEAN, _STOCK, _PRINTED = "mean", "mean, no limit", "mean, paper's Table 1"


def with_interval(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return rows with the ends of ± 1.96 standard errors around a column of scores."""
    reach = 1.96 * rows["stderr"].astype(float).fillna(0.0)
    ends = {f"{name}_low": rows[name] - reach, f"{name}_high": rows[name] + reach}
    return rows.assign(**ends).drop(columns="stderr")


def over_tasks(
    cells: pd.DataFrame, tasks: Collection[str], by: list[str], **loads: str
) -> Iterator[dict[str, Any]]:
    """Yield, for each group of cells, means over tasks that count equally.

    ``score`` and its standard error over documents are in percent; ``lacking`` are the tasks that
    have no cell, for which there is nothing else. Seeds of one task are averaged first. They saw
    the same documents, so their standard errors are averaged too and do not shrink with their
    number.

    Args:
        cells: Some rows of the frame of cells.
        tasks: All tasks of the mean.
        by: The columns whose values tell groups apart.
        loads: Columns of statistics, by the name of their mean.
    """
    for values, same in cells.groupby(by, sort=False, dropna=False):
        lacking = [task for task in tasks if task not in set(same["task"])]
        mean: dict[str, Any] = dict(zip(by, values, strict=True)) | {"lacking": lacking}
        if not lacking:
            of_tasks = same.groupby("task", sort=False)
            errors = of_tasks["stderr"].agg(lambda seeds: seeds.mean(skipna=False))
            mean["score"] = 100 * of_tasks["value"].mean().mean()
            mean["stderr"] = 100 * np.hypot.reduce(errors.to_numpy(float)) / len(errors)
            for name, column in loads.items():
                mean[name] = of_tasks[column].mean().mean(skipna=False)
        yield mean


def curves(sources: FigureRecords) -> pd.DataFrame:
    """Return scores under Token Drop by γ of each task and their mean, and what was dropped.

    The mean is there where all tasks are. A model without a record with a capacity is left out; a
    UsageError if all are.
    """
    import pandas as pd

    # γ=∞ is the baseline, which the figure has anyway.
    limited = sources.cells("curve").dropna(subset="gamma").sort_values("gamma", kind="stable")
    if limited.empty:
        more = "; ".join(sources.absent[:2])
        raise UsageError(f"fig12: its curves have no record; compute them: {more}")
    unlimited = sources.cells("unlimited")
    loads = {"dropped": "drop_rate", "effective_gamma": "effective_gamma"}
    rows: list[dict[str, Any]] = []
    for model, title in sources.models.items():
        of_model = limited[limited["model"] == model]
        if of_model.empty:
            sources.notes.append(f"{title} is left out: it has no record.")
            continue
        about = {"model": title}
        for task, name in sources.tasks.items():
            for _, cell in of_model[of_model["task"] == task].iterrows():
                columns = {name: cell[name] for name in ("gamma", "effective_gamma")}
                rows.append(about | {"task": name, "score": 100 * cell["value"]} | columns)
        lacking: dict[str, list[str]] = {}
        for mean in over_tasks(of_model, sources.tasks, ["gamma"], **loads):
            if missing := mean.pop("lacking"):
                names = ", ".join(sources.tasks[task] for task in missing)
                lacking.setdefault(names, []).append(gamma_text(mean["gamma"]))
            else:
                rows.append(about | {"task": _MEAN} | mean)
        sources.notes.extend(
            [f"{title}: no mean at γ={', '.join(at)}: {of} missing." for of, at in lacking.items()]
        )
        of_stock = over_tasks(unlimited[unlimited["model"] == model], sources.tasks, ["model"])
        stock = (about | {"task": _STOCK, "score": mean.get("score")} for mean in of_stock)
        rows += [mean for mean in stock if mean["score"] is not None]
        if published := table1_scores(model, list(sources.tasks.values())):
            sources.notes.append(published_note("table1"))
            values = zip(published["gamma"], published["value"], strict=True)
            printed = {"task": _PRINTED}
            rows += [about | printed | {"gamma": at, "score": value} for at, value in values]
    columns = ["model", "task", "gamma", "effective_gamma", "score", "stderr", "dropped"]
    frame = with_interval(pd.DataFrame(rows, columns=columns), "score")
    frame["dropped_percent"] = 100 * frame.pop("dropped").astype(float)
    return frame


@figure(
    "Figure 12 (v1: 6)", "Performance by capacity factor", curves, parts=["curve", "unlimited"]
)  # fmt: skip
def fig12(rows: pd.DataFrame) -> Figure:
    """Score of each task and their mean under Token Drop, and the share of assignments that was
    really dropped, by model. γ=0 silences every routed expert. The paper shows OLMoE and
    Qwen1.5-MoE, each as base and as chat model. γ is that after rounding where all records have it.
    """
    is_measured = ~rows["task"].isin([_STOCK, _PRINTED])
    is_rounded = bool(rows["effective_gamma"][is_measured].notna().all())
    rows["x"] = rows["effective_gamma"].astype(float) if is_rounded else rows["gamma"]
    rows["x"] = rows["x"].fillna(rows["gamma"])
    models = list(d.each(rows, "model"))
    width = d.PAGE if len(models) > 1 else d.COLUMN
    layout = {"sharex": True, "sharey": "row", "height_ratios": [3, 1]}
    canvas, grid = d.canvas(width, 3.1, 2, len(models), **layout)
    tasks = d.places(rows["task"][is_measured & (rows["task"] != _MEAN)])
    for (title, same), upper, lower in zip(models, *grid, strict=True):
        of_tasks = dict(d.each(same, "task"))
        for task, place in tasks.items():
            look = d.line_look(place, 6, markersize=2.2, linewidth=0.6)
            curve = of_tasks.get(task, same[:0]).drop(columns=["score_low", "score_high"])
            d.line(upper, curve, "x", "score", task, **look)
        if (mean := of_tasks.get(_MEAN)) is not None:
            look = {"color": d.BLACK, "linewidth": 1.4}
            d.line(upper, mean, "x", "score", "mean ± 1.96 SE", **look)
            look = {"color": d.BLACK, "marker": "o", "markersize": 2}
            d.line(lower, mean, "x", "dropped_percent", **look)
        if (stock := of_tasks.get(_STOCK)) is not None:
            d.rule(upper, stock["score"].iloc[0], (0, (1, 2)), 1.0, _STOCK)
        if (printed := of_tasks.get(_PRINTED)) is not None:
            printed = printed[["x", "score"]]
            d.line(upper, printed, "x", "score", _PRINTED, **d.STAR, markerfacecolor="white")
        upper.set_title(title)
        lower.set_ylim(0, 105)
        label = "γ after rounding" if is_rounded else "capacity factor γ"
        d.gamma_axis(lower, [0.0, 3.0, *rows["x"][is_measured]], label)
    grid[0][0].set_ylabel("score (%)")
    grid[1][0].set_ylabel("dropped (%)")
    d.legend(canvas, 5)
    return canvas


def by_rounds(sources: FigureRecords) -> pd.DataFrame:
    """Return score and lost pairs by rounds; one round is Token Drop, and none the stock model."""
    import pandas as pd

    cells = sources.cells("one_round", "rounds")
    cells["rounds"] = cells["rounds"].fillna(1).astype(int)
    layers = sources.layers("one_round", "rounds").groupby("cell")
    computed = layers["load_after"].agg(lambda loads: sum(map(sum, loads)))
    cells["unserved"] = cells["cell"].map(1 - computed / layers["assignments"].sum())
    loads = {"dropped": "drop_rate", "unserved": "unserved"}
    rows = list(over_tasks(cells.sort_values("rounds"), sources.tasks, ["rounds"], **loads))
    for mean in rows:
        if mean["lacking"]:
            number = mean["rounds"]
            sources.notes.append(f"No mean after {number} rounds: not every task is there.")
    stock = sources.cells("baseline").assign(rounds=0)
    rows += over_tasks(stock, sources.tasks, ["rounds"])
    about = {"model": sources.title, "tasks": len(sources.tasks), "gamma": cells["gamma"].min()}
    columns = ["rounds", "score", "stderr", *loads]
    whole = [mean for mean in rows if not mean["lacking"]]
    frame = with_interval(pd.DataFrame(whole, columns=columns), "score").assign(**about)
    for name in loads:
        frame[f"{name}_percent"] = 100 * frame.pop(name).astype(float)
    return frame


@figure(
    "Figure 7 of v1", "Token Reroute by rounds: {model}", by_rounds,
    parts=["one_round", "rounds", "baseline"],
)  # fmt: skip
def v1_fig7(rows: pd.DataFrame) -> Figure:
    """Mean score by rounds of Token Reroute, and two shares of T·K: pairs of a token's own top-k
    that were not computed, and assignments that no expert took over. One round is Token Drop.
    """
    layout = {"sharex": True, "height_ratios": [3, 2]}
    canvas, ((upper,), (lower,)) = d.canvas(d.COLUMN, 2.6, 2, 1, **layout)
    limited, stock = rows[rows["rounds"] > 0], rows[rows["rounds"] == 0]
    name = f"{method_title('token_reroute')} ± 1.96 SE"
    d.line(upper, limited, "rounds", "score", name, color=d.BLUE, marker="o", capsize=2)
    if len(stock):
        d.rule(upper, stock["score"].iloc[0], ":", 1.0, "no limit")
    look = {"marker": "s", "linestyle": "--", "color": d.VERMILLION}
    d.line(lower, limited, "rounds", "dropped_percent", "top-k pairs dropped", **look)
    look = {"marker": "^", "color": d.BLUE}
    d.line(lower, limited, "rounds", "unserved_percent", "of them not replaced", **look)
    first = rows.iloc[0]
    gamma = gamma_suffix(first["gamma"], ", γ = ")
    upper.set_title(f"{first['model']}, {first['tasks']} tasks{gamma}")
    upper.set_ylabel("mean score (%)")
    upper.margins(y=0.15)
    numbers = limited["rounds"].tolist()
    names = [f"1 ({method_title('score')})" if n == 1 else str(n) for n in numbers]
    lower.set_xticks(numbers, names)
    lower.margins(y=0.2)
    lower.set(xlabel="rounds", ylabel="share (%)", ylim=(0, None))
    for axes in (upper, lower):
        axes.grid(False, axis="x")
    d.legend(canvas, 2)
    return canvas


def by_peak(sources: FigureRecords) -> pd.DataFrame:
    """Return mean score and mean peak load of each method and γ, and whether it is on the front."""
    import pandas as pd

    cells = sources.cells("baseline", "methods", "at_random")
    on_devices = cells["granularity"].eq("device")
    cells["method"] = cells["method"].mask(on_devices, "device_drop")
    rows = []
    loads = {"peak": "load.mean_peak_after"}
    for mean in over_tasks(cells, sources.tasks, ["method", "gamma"], **loads):
        if mean["lacking"]:
            gamma = None if np.isnan(mean["gamma"]) else mean["gamma"]
            name = metric_and_title(mean["method"]) + gamma_suffix(gamma, " at γ=")
            sources.notes.append(f"{name} is left out: not every task is there.")
        else:
            rows.append(mean)
    frame = pd.DataFrame(rows, columns=["method", "gamma", "score", "peak"])
    points = list(zip(frame["peak"], frame["score"], strict=True))
    return frame.assign(
        front=d.pareto_front(points), model=sources.title, tasks=len(sources.tasks)
    ).sort_values(["method", "peak"], kind="stable")


@figure(
    "not in the paper", "Quality against peak load: {model}", by_peak,
    parts=["baseline", "methods", "at_random"],
)  # fmt: skip
def pareto(rows: pd.DataFrame) -> Figure:
    """Mean score against the highest load of an expert over the mean load N̄, mean over batches,
    layers and tasks, for every method; along a line γ is 1.0, 1.5, 2.0. Grey: the Pareto front, on
    which no other point has both less peak and more score. Random is a mean over seeds.
    """
    canvas, ((axes,),) = d.canvas(d.COLUMN, 3.2)
    d.front(axes, rows, "peak", "score")
    of_methods = dict(d.each(rows, "method"))
    for method, look in LOOKS.items():
        if method in of_methods:
            line = of_methods[method][["peak", "score"]]
            d.line(axes, line, "peak", "score", metric_and_title(method), **look)
    axes.set_title(", ".join(f"{r['model']}, {r['tasks']} tasks" for _, r in rows[:1].iterrows()))
    axes.set(xlabel=PEAK, ylabel="mean score (%)")
    d.legend(canvas, 2)
    return canvas


def metric_and_title(method: str) -> str:
    """Return a method's printed name, with its name as a selection metric where that is another."""
    title, metric = method_title(method), metric_title(method)
    return title if title == metric else f"{title} ({metric})"


def flips(sources: FigureRecords) -> pd.DataFrame:
    """Return how many answers differ between settings of the batch, and by how much the score.

    Every pair of settings of a method is compared, over batch sizes and over shuffles:
    ``flips_percent`` is the mean over pairs, its ends the lowest and the highest pair.
    """
    import pandas as pd

    rows = []
    for part, dealt in (("batch_sizes", "by length"), ("shuffles", "by length and at random")):
        cells = sources.cells(part)
        sizes = ", ".join(map(str, sorted(cells["batch_size"].astype(int).unique())))
        for method, same in d.each(cells, "method"):
            if rates := _flip_rates(sources, same):
                rows.append(
                    {
                        "dealt": f"{dealt}, batches of {sizes}",
                        "method": method_title(method),
                        "flips_percent": statistics.fmean(rates),
                        "flips_percent_low": min(rates),
                        "flips_percent_high": max(rates),
                        "score_range": 100 * (same["value"].max() - same["value"].min()),
                    }
                )
    if not rows:
        raise UsageError(
            "companions: no method has two settings with the same documents; measure them: "
            + "; ".join(sources.absent[:2])
        )
    cells = sources.cells("batch_sizes", "shuffles")
    about = {"model": sources.title, "documents": cells["n"].iloc[0], "gamma": cells["gamma"].min()}
    return pd.DataFrame(rows).assign(**about)


def _flip_rates(sources: FigureRecords, cells: pd.DataFrame) -> list[float]:
    """Return the share of answers that differ, in percent, for each pair of settings."""
    answers = {}
    for number, cell in cells.iterrows():
        dealt = "by length" if cell["shuffle"] is None else f"shuffle {cell['shuffle']:g}"
        setting = f"batch {cell['batch_size']}, {dealt}"
        answers[setting] = answered_by_cells(sources.results, cells.loc[[number]])
    rates = []
    for first, second in itertools.combinations(answers, 2):
        # The mixture is of several tasks, by model and task.
        paired = [pair(answers[first][of], answers[second].get(of, [])) for of in answers[first]]
        if unpaired := next((p for p in paired if isinstance(p, Unpaired)), None):
            title = method_title(cells["method"].iloc[0])
            both = f"{first} and {second}"
            sources.notes.append(f"{title}: {both} are not compared: {unpaired.reason}.")
        else:
            moved = np.concatenate([p.differences for p in paired if isinstance(p, Paired)]) != 0
            rates.append(100 * float(moved.mean()))
    return rates


@figure(
    "not in the paper", "How much an answer depends on its batch: {model}", flips,
    parts=["batch_sizes", "shuffles"],
)  # fmt: skip
def companions(rows: pd.DataFrame) -> Figure:
    """Left: share of documents whose answer is right in one setting and wrong in another, mean over
    pairs of settings; whiskers: lowest and highest pair. Right: range of the score. Batches of
    OBQA, PIQA, RTE and BoolQ; dealt by length in four sizes, or of 16 by length and at random
    (three seeds), which mixes the tasks.
    """
    canvas, ((left, right),) = d.canvas(d.PAGE, 2.1, 1, 2, width_ratios=[3, 2])
    number = d.places(rows["method"])
    looks = (d.bar_look(d.BLUE), d.bar_look(d.SKY, "////"))
    for (dealt, same), shift, look in zip(d.each(rows, "dealt"), (-0.2, 0.2), looks, strict=False):
        places = same["method"].map(number) + shift
        thin = {"error_kw": {"elinewidth": 0.7, "capsize": 2}}
        ends = d.whiskers(same, "flips_percent")
        left.bar(places, same["flips_percent"], 0.38, yerr=ends, **look | thin, label=dealt)
        right.bar(places, same["score_range"], 0.38, **look)
    first = rows.iloc[0]
    gamma = gamma_suffix(first["gamma"], ", γ = ")
    left.set_title(f"{first['model']}, {first['documents']:,} documents{gamma}")
    left.set_ylabel("answers that flip (%)")
    right.set_ylabel("score range (points)")
    for axes in (left, right):
        d.name_places(axes, [name.replace(" ", "\n") for name in number])
        axes.grid(False, axis="x")
        axes.set_ylim(0, None)
    d.legend(canvas, 2)
    return canvas
