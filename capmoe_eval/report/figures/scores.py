"""Mean scores by γ (Figure 12), by rounds (Figure 7 of v1), by peak load, and by batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_suffix, gamma_text, method_title
from capmoe_eval.lazy import pd
from capmoe_eval.paper.printed import published_note, table1_scores
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.sources import Sources

_MEAN, _STOCK, _PRINTED = "mean", "mean, no limit", "mean, paper's Table 1"


def with_interval(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return rows with the ends of ± 1.96 standard errors around a column of scores."""
    reach = 1.96 * rows["stderr"].astype(float).fillna(0.0)
    ends = {f"{name}_low": rows[name] - reach, f"{name}_high": rows[name] + reach}
    return rows.assign(**ends).drop(columns="stderr")


def over_tasks(
    cells: pd.DataFrame, tasks: Mapping[str, str], by: list[str], **loads: str
) -> pd.DataFrame:
    """Return means over tasks that count equally, a row for each group of cells.

    ``score`` and its standard error over documents are in percent; ``lacking`` has the titles of
    the tasks of which the group has no cell. Seeds of one task are averaged first. They saw the
    same documents, so their standard errors are averaged too and do not shrink with their number.

    Args:
        cells: Some rows of the frame of cells.
        tasks: Titles of all tasks of the mean, by task.
        by: The columns whose values tell groups apart.
        loads: Columns of statistics, by the name of their mean.
    """

    def mean(values: pd.Series[float]) -> float:
        return values.mean(skipna=False)

    columns = {name: (column, "mean") for name, column in loads.items()}
    seeds = cells.groupby([*by, "task"], sort=False, dropna=False)
    of_tasks = seeds.agg(score=("value", "mean"), stderr=("stderr", mean), **columns)
    groups = of_tasks.reset_index().groupby(by, sort=False, dropna=False)
    rows = groups.agg(
        **{name: (name, mean) for name in ("score", *loads)},
        stderr=("stderr", lambda errors: np.hypot.reduce(errors.to_numpy()) / len(errors)),
        lacking=("task", lambda there: ", ".join(tasks[t] for t in tasks if t not in set(there))),
    )
    rows[["score", "stderr"]] *= 100
    return rows.reset_index()


def whole(rows: pd.DataFrame, notes: list[str], name: Callable[[Any], str]) -> pd.DataFrame:
    """Return the means over all tasks; the names of the others are noted."""
    for lacking, same in rows[rows["lacking"] != ""].groupby("lacking", sort=False):
        names = ", ".join(name(row) for row in same.itertuples())
        notes.append(f"No mean over tasks of {names}: {lacking} missing.")
    return rows[rows["lacking"] == ""].drop(columns="lacking")


def curves(sources: Sources) -> pd.DataFrame:
    """Return scores under Token Drop by γ of each task and their mean, and what was dropped.

    The mean is there where all tasks are. A model without a record with a capacity is left out; a
    UsageError if all are.
    """
    # γ=∞ is the baseline, which the figure has anyway.
    limited = sources.cells("curve").dropna(subset="gamma").sort_values("gamma", kind="stable")
    if limited.empty:
        more = "; ".join(sources.absent[:2])
        raise UsageError(f"fig12: its curves have no record; compute them: {more}")
    models = {key: title for key, title in sources.models.items() if key in set(limited["model"])}
    without = [title for key, title in sources.models.items() if key not in models]
    sources.notes.extend(f"{title} is left out: it has no record." for title in without)
    loads = {"dropped": "drop_rate", "effective_gamma": "effective_gamma"}
    means = whole(
        over_tasks(limited, sources.tasks, ["title", "gamma"], **loads),
        sources.notes,
        lambda mean: f"{mean.title} at γ={gamma_text(mean.gamma)}",
    )
    stock = over_tasks(sources.cells("unlimited"), sources.tasks, ["title"])
    stock = stock[(stock["lacking"] == "") & stock["title"].isin(models.values())]
    columns = ["title", "task", "gamma", "effective_gamma", "score", "stderr", "dropped"]
    parts = [
        limited.assign(task=limited["asked"], score=100 * limited["value"], stderr=np.nan),
        means.assign(task=_MEAN),
        stock.assign(task=_STOCK, stderr=np.nan),
    ]
    for model, title in models.items():
        if published := table1_scores(model, list(sources.tasks.values())):
            sources.notes.append(published_note("table1"))
            points = {"gamma": published["gamma"], "score": published["value"]}
            parts.append(pd.DataFrame(points).assign(title=title, task=_PRINTED))
    rows = pd.concat([part.reindex(columns=columns) for part in parts], ignore_index=True)
    lines = [*sources.tasks.values(), _MEAN, _STOCK, _PRINTED]
    order = [rows["task"].map(lines.index), rows["title"].map([*models.values()].index)]
    rows = rows.iloc[np.lexsort(order)].reset_index(drop=True).rename(columns={"title": "model"})
    return with_interval(rows.assign(dropped_percent=100 * rows.pop("dropped")), "score")


@figure(
    "Figure 12 (v1: 6)", "Performance by capacity factor", curves, parts=["curve", "unlimited"]
)  # fmt: skip
def fig12(rows: pd.DataFrame) -> d.Figure:
    """Left: score of each task and their mean under Token Drop, by model. Right: the share of
    assignments that was really dropped. γ=0 silences every routed expert. The paper shows OLMoE and
    Qwen1.5-MoE, each as base and as chat model. γ is that after rounding where all records have it.
    """
    is_measured = ~rows["task"].isin([_STOCK, _PRINTED])
    is_rounded = bool(rows["effective_gamma"][is_measured].notna().all())
    label = "γ after rounding" if is_rounded else "capacity factor γ"
    rows["x"] = rows["effective_gamma"].fillna(rows["gamma"]) if is_rounded else rows["gamma"]
    tasks = d.places(rows["task"][is_measured & (rows["task"] != _MEAN)])
    looks = {name: d.line_look(n, 6, markersize=2.2, linewidth=0.6) for name, n in tasks.items()}
    models = list(d.each(rows, "model"))
    layout = {"sharex": True, "sharey": "col", "width_ratios": [3, 2]}
    canvas, grid = d.canvas(0.6 + 1.5 * len(models), len(models), 2, **layout)
    for (title, same), (left, right) in zip(models, grid, strict=True):
        curve = same[same["task"].isin(tasks)].drop(columns=["score_low", "score_high"])
        d.lines(left, curve, "x", "score", "task", looks)
        mean = same[same["task"] == _MEAN]
        d.line(left, mean, "x", "score", "mean ± 1.96 SE", color=d.BLACK, linewidth=1.4)
        look: d.Look = {"color": d.BLACK, "marker": "o", "markersize": 2}
        d.line(right, mean, "x", "dropped_percent", **look)
        for score in same.loc[same["task"] == _STOCK, "score"]:
            d.rule(left, score, (0, (1, 2)), 1.0, _STOCK)
        printed = same.loc[same["task"] == _PRINTED, ["x", "score"]]
        if len(printed):
            d.line(left, printed, "x", "score", _PRINTED, **d.STAR, markerfacecolor="white")
        left.set(title=title, ylabel="score (%)")
        right.set(ylim=(0, 105), ylabel="dropped (%)")
    for axes in grid[-1]:
        d.gamma_axis(axes, [0.0, 3.0, *rows["x"][is_measured]], label)
    d.legend(canvas, 3)
    return canvas


def by_rounds(sources: Sources) -> pd.DataFrame:
    """Return score and lost pairs by rounds; one round is Token Drop, and none the stock model."""
    cells = sources.cells("one_round", "rounds")
    cells["rounds"] = cells["rounds"].fillna(1).astype(int)
    layers = sources.layers("one_round", "rounds").groupby("cell")
    computed = layers["load_after"].agg(lambda loads: sum(map(sum, loads)))
    cells["unserved"] = cells["cell"].map(1 - computed / layers["assignments"].sum()).astype(float)
    cells = pd.concat([cells.sort_values("rounds"), sources.cells("baseline").assign(rounds=0)])
    loads = {"dropped_percent": "drop_rate", "unserved_percent": "unserved"}
    rows = over_tasks(cells, sources.tasks, ["rounds"], **loads)
    rows = with_interval(whole(rows, sources.notes, lambda m: f"{m.rounds} rounds"), "score")
    # The stock model drops nothing that is shown.
    rows[list(loads)] = 100 * rows[list(loads)].where(rows["rounds"] > 0)
    rows = rows.assign(model=sources.title, tasks=len(sources.tasks))
    return rows.assign(gamma=cells["gamma"].min())


@figure(
    "Figure 7 of v1", "Token Reroute by rounds: {model}", by_rounds,
    parts=["one_round", "rounds", "baseline"],
)  # fmt: skip
def v1_fig7(rows: pd.DataFrame) -> d.Figure:
    """Mean score by rounds of Token Reroute, and two shares of T·K: pairs of a token's own top-k
    that were not computed, and assignments that no expert took over. One round is Token Drop.
    """
    canvas, ((upper,), (lower,)) = d.canvas(3.0, 2, 1, sharex=True, height_ratios=[3, 2])
    limited, stock = rows[rows["rounds"] > 0], rows[rows["rounds"] == 0]
    name = f"{method_title('token_reroute')} ± 1.96 SE"
    d.line(upper, limited, "rounds", "score", name, color=d.BLUE, marker="o", capsize=2)
    for score in stock["score"]:
        d.rule(upper, score, ":", 1.0, "no limit")
    look = {"marker": "s", "linestyle": "--", "color": d.VERMILLION}
    d.line(lower, limited, "rounds", "dropped_percent", "top-k pairs dropped", **look)
    look = {"marker": "^", "color": d.BLUE}
    d.line(lower, limited, "rounds", "unserved_percent", "of them not replaced", **look)
    first = rows.iloc[0]
    gamma = gamma_suffix(first["gamma"], ", γ = ")
    upper.set(title=f"{first['model']}, {first['tasks']} tasks{gamma}", ylabel="mean score (%)")
    upper.margins(y=0.15)
    numbers = limited["rounds"].tolist()
    names = [f"1 ({method_title('score')})" if n == 1 else str(n) for n in numbers]
    lower.set_xticks(numbers, names)
    lower.margins(y=0.2)
    lower.set(xlabel="rounds", ylabel="share (%)", ylim=(0, None))
    d.legend(canvas)
    return canvas
