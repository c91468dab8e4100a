"""Points that methods of other papers lose, beside Token Drop, as small multiples."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from capmoe_bench.timings import read_evaluation
from capmoe_eval.experiment.names import method_title
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.sources import Sources

from capmoe_methods.comparison import lost, peaks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOST: Final = ("lost", "lost_low", "lost_high")
_DROP: Final = method_title("score")
_KINDS: Final = {"prompts": "questions", "decode steps": "generation"}
_BOUNDED: Final = {
    "activated": "activated experts /\nwithout a limit",
    "expert_peak": "fullest expert /\nmean load",
}
_RANK: Final = {"rank_peak": "fullest rank / mean load"}
_KNOBS: Final = {
    "gamma": "γ",
    "k0": "k0",
    "expert_budget": "budget",
    "min_similarity": "similarity",
    "viable_score": "score",
}
_LOSSLESS: Final = {  # a line and its dash, by what a method's name has before a +
    "EPLB": ("EPLB+R, nothing dropped", "--"),
    "LPLB": ("LPLB+R, nothing dropped", ":"),
}
_NO_LIMIT: Final[d.Look] = {
    **{"color": d.GREY, "linestyle": "", "marker": "x", "markersize": 5, "markeredgewidth": 1.5}
}
_REFERENCE: Final[d.Look] = {"color": d.GREY, "linewidth": 0.8, "markersize": 2.5, "zorder": 1}
_COLOURED: Final[d.Look] = {"color": d.BLUE, "linewidth": 0.8, "markersize": 3.5, **d.THIN}
_EVERY_LOAD: Final = tuple(
    f"{limit}{load}" for limit in ("", "unlimited_") for load in (*_BOUNDED, *_RANK)
)
_WORDS: Final = {
    "multiples": "Panels of a column have the same axes; lower and further left is better. Blue: "
    "the method. Grey: Token Drop. Cross: no limit, the loads of the router alone."
}


def losses(
    sources: Sources, stock: pd.DataFrame, cells: pd.DataFrame, tasks: Collection[str], where: str
) -> Iterator[tuple[pd.DataFrame, dict[str, float]]]:
    """Yield the cells of each setting, and the points that they lose against those of the stock.

    A setting that does not pair is left out, which a note says by the cells' ``name``.
    """
    for _, same in cells.groupby("setting", sort=False):
        points = lost(sources.results, stock, same, tasks)
        if isinstance(points, str):
            name = same["name"].iloc[0]
            sources.notes.append(f"{where}: {name} is left out: {points}.")
        else:
            yield same, dict(zip(LOST, points, strict=True))


def settings(sources: Sources) -> pd.DataFrame:
    """Return what each setting loses and the loads that it may bound, tasks counting equally.

    ``unlimited_…`` are the loads of the router alone, in the forwards of the method. Settings
    without a point are named in notes. Those of a line are in the order of its numbers.
    """
    limited, stock, rows = _limited(sources), sources.cells("stock"), []
    for of, model in itertools.product(_KINDS.values(), sources.models):
        asked = set(limited["task"][limited["of"] == of])
        tasks = {task: title for task, title in sources.tasks.items() if task in asked}
        title = sources.models[model]
        about = {"of": f"{of} ({', '.join(tasks.values())})", "model": title}
        of_model = limited[(limited["of"] == of) & (limited["model"] == model)]
        of_stock = stock[stock["model"] == model]
        for same, ends in losses(sources, of_stock, of_model, tasks, f"{title}, {of}"):
            loads = same.groupby("task")[list(_EVERY_LOAD)].mean().mean(skipna=False)
            rows.append(about | same.iloc[0][["line", *_KNOBS]].to_dict() | ends | loads.to_dict())
    columns = ["of", "model", "line", *_KNOBS, *LOST, *_EVERY_LOAD]
    frame = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_EVERY_LOAD, float))
    frame["activated"] /= frame["unlimited_activated"]
    frame["unlimited_activated"] = frame["activated"].where(frame["activated"].isna(), 1.0)
    lines = frame.groupby(["of", "model", "line"], sort=False)
    rising = [same.sort_values([*_KNOBS], kind="stable") for _, same in lines]
    return pd.concat(rising, ignore_index=True) if rising else frame


def _limited(sources: Sources) -> pd.DataFrame:
    """Return the cells of all parts but the stock's, with loads and numbers.

    ``of`` are the forwards that they bound, ``line`` is the line that a cell's point is on.
    """
    cells = sources.cells(*(part for part in sources.parts if part != "stock"))
    # Ranks are known where there are some; stock cells may be older than counts of activation.
    has_ranks = cells["ep_size"].fillna(1) > 1
    for limit, when in (("", "after"), ("unlimited_", "before")):
        cells[f"{limit}activated"] = cells[f"load.activated_{when}"].astype(float)
        cells[f"{limit}expert_peak"] = cells[f"load.mean_peak_{when}"].astype(float)
        cells[f"{limit}rank_peak"] = peaks(sources.results, "device", when).where(has_ranks)
    titles = cells["method"].map(method_title).astype(str)  # of no cells, too
    titles = titles.mask(cells["granularity"] == "device", titles + ", devices")
    cells["line"] = cells["name"] = titles.mask(cells["candidates"] == "global", "expert choice")
    cells[[*_KNOBS]] = cells[[*_KNOBS]].astype(float).fillna(0.0)
    kinds = {True: _KINDS["decode steps"], False: _KINDS["prompts"]}
    return cells.assign(of=cells["decode"].eq("only").map(kinds))


@figure(
    "not in the paper",
    "Points lost on questions: methods of other papers beside Token Drop",
    settings,
    words=_WORDS,
    experiment="comparators",
    parts=(
        *("stock", "drop", "oea", "oea_of_three", "oea_of_four", "xshare", "sere", "laser"),
        "expert_choice",
    ),
    tasks=("obqa", "piqa"),
)
def comparators(rows: pd.DataFrame) -> Figure:
    """A row for each method: points lost against no limit, paired by document, tasks counting
    equally, with 95 % intervals over documents; below 0 the method gains. Left against the
    activated experts of a forward and layer over those that the router alone would activate in the
    same forwards, right against the highest load of an expert over the mean load, means over
    forwards and layers. Batches are bounded as a whole. {multiples} Along a line the numbers of its
    title grow. Token Drop and expert choice bound the right axis, OEA, XShare and SERE the left
    one; LASER balances loads without a bound.
    """
    return _by_method(rows)


@figure(
    "not in the paper",
    "Points lost on generation: methods of other papers beside Token Drop, on decode steps",
    settings,
    words=_WORDS,
    experiment="comparators",
    parts=(
        *("stock", "drop_steps", "oea_steps", "oea_of_four_steps", "xshare_steps", "sere_steps"),
        *("laser_steps", "expert_choice_steps"),
    ),
    tasks=("gsm8k",),
)
def comparators_decode(rows: pd.DataFrame) -> Figure:
    """As in comparators, of generated answers. Decode steps alone are bounded, and the loads are
    theirs. {multiples} γ is nominal: a decode step has few tokens, and a capacity is a whole number
    of them.
    """
    return _by_method(rows)


def _by_method(rows: pd.DataFrame) -> Figure:
    """Draw a row of panels for each method, a panel for each load."""
    markers = dict(zip(d.places(rows["model"]), itertools.cycle(d.MARKERS), strict=False))
    drops, panels = rows[rows["line"] == _DROP], {}
    for line, same in d.each(rows[rows["line"] != _DROP], "line"):
        ends = {name: (same[knob].min(), same[knob].max()) for knob, name in _KNOBS.items()}
        grow = [f"{name} {low:g} → {high:g}" for name, (low, high) in ends.items() if low < high]
        title = ": ".join([line, *([", ".join(grow)] if grow else [])])
        panels[title] = pd.concat([drops, same.assign(name=same["model"])])
    canvas, _ = _multiples(panels, _BOUNDED, markers)
    canvas.suptitle("; ".join(rows["of"].unique()))
    d.legend(canvas, 2)
    return canvas


def ranks(sources: Sources) -> pd.DataFrame:
    """Return what budgets of ranks lose against the fullest rank, and balancing without loss.

    Balancing, a row without points, is that of the figure's tasks, planned on the same task; notes
    have what a plan on another task gives.
    """
    rows, file = settings(sources), sources.bench / "placement.json"
    if not file.is_file():
        sources.notes.append(
            "No line of lossless load balancing: capmoe-eval bench placement makes it."
        )
        return rows
    plans = pd.DataFrame(read_evaluation(file)["balances"])
    plans = plans[plans["judged_on"].isin(sources.tasks) & plans["model"].isin(sources.models)]
    plans["model"] = plans["model"].map(sources.models)
    if plans.empty:  # partitioned, no text has no columns
        return rows
    order = d.places(sources.models.values())
    plans = plans.sort_values("model", key=lambda models: models.map(order), kind="stable")
    kind = plans["method"].str.partition("+")
    plans["line"] = kind[0].map({key: name for key, (name, _) in _LOSSLESS.items()})
    plans.loc[kind[1] == "", "line"] = None  # without copies
    plans["is_same"] = plans["planned_on"] == plans["judged_on"]
    sides = [rows]
    for of, panels in d.each(rows, "of"):
        forwards = next(name for name, title in _KINDS.items() if of.startswith(title))
        same = plans[plans["of"] == forwards]
        balanced = same.query("line.notna() and is_same")
        if len(balanced):
            lines = balanced.assign(of=of, rank_peak=balanced["straggler"])
            sides.append(lines.reindex(columns=rows.columns).astype(rows.dtypes.to_dict()))
            judged = ", ".join(sorted(balanced["judged_on"].map(sources.tasks).unique()))
            text = f"Balancing of {forwards} was planned and measured on {judged}."
            others = same[same["model"].isin(panels["model"])]
            others = others.query("method == 'contiguous' or line.notna() and not is_same")
            sources.notes.append(f"{text} Not drawn: {'; '.join(_peaks(others))}.")
    return pd.concat(sides, ignore_index=True)


def _peaks(plans: pd.DataFrame) -> Iterator[str]:
    """Say what each model's fullest rank has without a plan, and with one of another task."""
    for model, same in d.each(plans, "model"):
        tasks = (" planned on " + same["planned_on"]).where(same["line"].notna(), "")
        ends = same["straggler"].map("{:.2f} ".format) + same["method"] + tasks
        yield f"{model} {', '.join(ends)}"


@figure(
    "not in the paper",
    "Points lost against the fullest rank: rerouting under device budgets beside Token Drop",
    ranks,
    words=_WORDS,
    experiment="comparators",
    parts=("stock", "drop_on_ranks", "reroute", "reroute_steps"),
)
def comparators_ranks(rows: pd.DataFrame) -> Figure:
    """A panel for each model: points lost against no limit, paired by document, with 95 % intervals
    over documents, against the highest load of a rank over the mean load, mean over forwards and
    layers. {multiples} Each rank bounds its own tokens. Of generation decode steps alone are
    bounded. Upright: the fullest rank with the experts replicated by EPLB (dashed) or LPLB
    (dotted), one more slot a rank, planned on other steps of the same task; nothing is dropped.
    """
    dashes = dict(_LOSSLESS.values())
    is_balanced = rows["line"].isin(dashes)
    limits = rows[~is_balanced].assign(name=rows["line"])
    panels = {f"{model}, {of}": same for (of, model), same in d.each(limits, ["of", "model"])}
    canvas, grid = _multiples(panels, _RANK, dict.fromkeys(rows["model"], "o"))
    titles = rows["model"] + ", " + rows["of"]
    for title, (axes,) in zip(panels, grid, strict=False):
        upright = rows[is_balanced & (titles == title)]
        for line, peak in zip(upright["line"], upright["rank_peak"], strict=True):
            d.rule(axes, peak, dashes[line], 0.8, line, is_upright=True)
    d.legend(canvas, 2)
    return canvas


def _multiples(
    panels: Mapping[str, pd.DataFrame], loads: Mapping[str, str], markers: Mapping[str, str]
) -> tuple[Figure, Any]:
    """Draw a row of panels, one for each load, for the settings of each title.

    Token Drop is grey, and the line of another setting has its ``name``; markers are of models.
    """
    count = max(1, len(panels))
    layout = {"sharex": "col", "sharey": True}
    canvas, grid = d.canvas(1.1 + 0.9 * count, count, len(loads), **layout)
    for (title, shown), sides in zip(panels.items(), grid, strict=False):
        is_drop = shown["line"] == _DROP
        drops, others = shown[is_drop], shown[~is_drop]
        for load, axes in zip(loads, sides, strict=True):
            d.rule(axes, 0)
            for model, curve in d.each(drops.dropna(subset=load), "model"):
                look = _REFERENCE | d.THIN | {"marker": markers[model]}
                d.line(axes, curve, load, "lost", **look)
            unlimited = others if len(others) else drops
            before = unlimited.groupby("model", sort=False)[f"unlimited_{load}"].mean().dropna()
            axes.plot(before, [0.0] * len(before), **_NO_LIMIT, label="no limit")
            for (model, name), curve in d.each(others.dropna(subset=load), ["model", "name"]):
                d.line(axes, curve, load, "lost", name, marker=markers[model], **_COLOURED)
        sides[0].set_title(title, loc="left")
    for axes, name in zip(grid[-1], loads.values(), strict=True):
        axes.set_xlabel(name)
    for axes in grid[:, 0]:
        axes.set_ylabel("points lost")
    # Without the marker of a model in the legend.
    grid[-1][-1].plot([], [], **_REFERENCE, label=_DROP)
    return canvas, grid
