"""Points that methods of other papers lose, beside Token Drop, as small multiples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_bench.timings import read_evaluation
from capmoe_eval.experiment.names import method_title
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure

from capmoe_methods.comparison import lost, peaks

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_eval.report.figures.sources import Sources
    from capmoe_eval.results.frames import Results
    from matplotlib.figure import Figure

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
_LOSSLESS: Final = {  # the dash of its line, by how a method's name begins
    "EPLB+": ("EPLB+R, nothing dropped", "--"),
    "LPLB+": ("LPLB+R, nothing dropped", ":"),
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
    "multiples": "All panels have the same axes; lower and further left is better. Blue: the "
    "method. Grey: Token Drop. Cross: no limit, the loads of the router alone."
}


def settings(sources: Sources) -> pd.DataFrame:
    """Return what each setting loses and the loads that it may bound, tasks counting equally.

    ``unlimited_…`` are the loads of the router alone, in the forwards of the method. Settings
    without a point are named in notes. Those of a line are in the order of its numbers.
    """
    import pandas as pd

    results = sources.results
    cells = results.cells.assign(
        **{knob: results.cells[knob].astype(float).fillna(0.0) for knob in _KNOBS},
        **_loads(results),
        line=_lines(results.cells),
    )
    stock, limited = cells.loc[sources.cells("stock").index], cells.loc[_limited(sources).index]
    rows = []
    for of, model in itertools.product(_KINDS, sources.models):
        tasks, title = _tasks(sources, of), sources.models[model]
        about = {"of": f"{_KINDS[of]} ({', '.join(tasks.values())})", "model": title}
        of_model = limited[_is_of(limited, of) & (limited["model"] == model)]
        for _, same in of_model.groupby("setting", sort=False):
            row = about | same.iloc[0][["line", *_KNOBS]].to_dict()
            points = lost(results, stock[stock["model"] == model], same, tasks)
            if isinstance(points, str):
                text = f"{title}, {_KINDS[of]}: {row['line']} is left out: {points}."
                sources.notes.append(text)
                continue
            ends = dict(zip(("lost", "lost_low", "lost_high"), points, strict=True))
            loads = same.groupby("task")[list(_EVERY_LOAD)].mean().mean(skipna=False)
            rows.append(row | ends | loads.to_dict())
    columns = ["of", "model", "line", *_KNOBS, "lost", "lost_low", "lost_high", *_EVERY_LOAD]
    frame = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_EVERY_LOAD, float))
    frame["activated"] /= frame["unlimited_activated"]
    frame["unlimited_activated"] = frame["activated"].where(frame["activated"].isna(), 1.0)
    lines = frame.groupby(["of", "model", "line"], sort=False)
    rising = [same.sort_values([*_KNOBS], kind="stable") for _, same in lines]
    return pd.concat(rising, ignore_index=True) if rising else frame


def _loads(results: Results) -> dict[str, pd.Series[float]]:
    """Return the loads of each cell, missing where they are not known."""
    cells = results.cells
    # Ranks are known where there are some; stock cells may be older than counts of activation.
    has_ranks = cells["ep_size"].fillna(1) > 1
    return {
        "activated": cells["load.activated_after"].astype(float),
        "expert_peak": cells["load.mean_peak_after"].astype(float),
        "rank_peak": peaks(results, "device").where(has_ranks),
        "unlimited_activated": cells["load.activated_before"].astype(float),
        "unlimited_expert_peak": cells["load.mean_peak_before"].astype(float),
        "unlimited_rank_peak": peaks(results, "device", "before").where(has_ranks),
    }


def _limited(sources: Sources) -> pd.DataFrame:
    return sources.cells(*(part for part in sources.parts if part != "stock"))


def _tasks(sources: Sources, of: str) -> dict[str, str]:
    """Return the titles of the tasks that have bounded forwards of a kind."""
    cells = _limited(sources)
    asked = set(cells["task"][_is_of(cells, of)])
    return {task: title for task, title in sources.tasks.items() if task in asked}


def _is_of(cells: pd.DataFrame, of: str) -> pd.Series[bool]:
    """Return which cells bound forwards of a kind."""
    is_of_steps = cells["decode"] == "only"
    return is_of_steps if of == "decode steps" else ~is_of_steps


def _lines(cells: pd.DataFrame) -> pd.Series[str]:
    """Return the line that each cell's point is on."""
    titles = cells["method"].map(method_title)
    titles = titles.mask(cells["granularity"] == "device", titles + ", devices")
    return titles.mask(cells["candidates"] == "global", "expert choice")


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
    markers = _markers(rows["model"])
    drops, others = rows[rows["line"] == _DROP], rows[rows["line"] != _DROP]
    lines = list(d.each(others, "line"))
    canvas, grid = _multiples(len(lines), list(_BOUNDED.values()))
    for (line, same), sides in zip(lines, grid, strict=True):
        for load, axes in zip(_BOUNDED, sides, strict=True):
            names = {model: model for model in markers}
            _beside_drop(axes, drops, same, load, names, markers)
        sides[0].set_title(line + _ranges(same), loc="left")
    canvas.suptitle("; ".join(rows["of"].unique()))
    d.legend(canvas, 2)
    return canvas


def ranks(sources: Sources) -> pd.DataFrame:
    """Return what budgets of ranks lose against the fullest rank, and balancing without loss.

    Balancing, a row without points, is that of the figure's tasks; what was planned on another task
    is left out.
    """
    import pandas as pd

    rows = settings(sources)
    file = sources.bench / "placement.json"
    balances = read_evaluation(file)["balances"] if file.is_file() else ()
    balanced: list[dict[str, Any]] = []
    for of, kind in _KINDS.items():
        tasks, judged = _tasks(sources, of), set()
        for model, title in sources.models.items():
            for row in balances:
                line = next((kind for kind in _LOSSLESS if row["method"].startswith(kind)), None)
                on = row["judged_on"]
                is_own = (row["model"], row["of"], row["planned_on"]) == (model, of, on)
                if line is not None and is_own and on in sources.tasks:
                    judged.add(sources.tasks[on])
                    about = {"of": f"{kind} ({', '.join(tasks.values())})", "model": title}
                    balanced.append(
                        about | {"line": _LOSSLESS[line][0], "rank_peak": row["straggler"]}
                    )
        # Only where there is a panel for it.
        if judged and rows["of"].str.startswith(kind).any():
            sources.notes.append(
                f"Balancing of {kind} was measured on {', '.join(sorted(judged))}."
            )
    if not balances:
        sources.notes.append(
            "No line of lossless load balancing: capmoe-eval bench placement makes it."
        )
    frame = pd.DataFrame(balanced, columns=rows.columns).astype(rows.dtypes.to_dict())
    return pd.concat([rows, frame], ignore_index=True) if len(frame) else rows


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
    (dotted), one more slot a rank, which drops nothing.
    """
    dashes = dict(_LOSSLESS.values())
    is_balanced = rows["line"].isin(dashes)
    panels = list(rows[~is_balanced].groupby(["of", "model"], sort=False))
    canvas, grid = _multiples(len(panels), list(_RANK.values()))
    for ((of, model), same), (axes,) in zip(panels, grid, strict=True):
        is_here = is_balanced & (rows["of"] == of) & (rows["model"] == model)
        for _, row in rows[is_here].iterrows():
            look = {"color": d.BLACK, "linewidth": 0.8, "linestyle": dashes[row["line"]]}
            axes.axvline(row["rank_peak"], **look, zorder=0, label=row["line"])
        drops, others = same[same["line"] == _DROP], same[same["line"] != _DROP]
        for line, of_line in list(d.each(others, "line")) or [("", others)]:
            _beside_drop(axes, drops, of_line, "rank_peak", {model: line}, {model: "o"})
        axes.set_title(f"{model}, {of}", loc="left")
    d.legend(canvas, 2)
    return canvas


def _markers(models: pd.Series[str]) -> dict[str, str]:
    return {model: d.MARKERS[n % len(d.MARKERS)] for model, n in d.places(models).items()}


def _multiples(count: int, loads: Sequence[str]) -> tuple[Figure, Any]:
    """Return rows of panels, one column of a page wide."""
    count = max(1, count)
    layout = {"sharex": "col", "sharey": True}
    canvas, grid = d.canvas(1.1 + 0.9 * count, count, len(loads), **layout)
    for axes, name in zip(grid[-1], loads, strict=True):
        axes.set_xlabel(name)
    for axes in grid[:, 0]:
        axes.set_ylabel("points lost")
    # Without the marker of a model in the legend.
    grid[-1][-1].plot([], [], **_REFERENCE, label=_DROP)
    return canvas, grid


def _beside_drop(
    axes: Any,
    drops: pd.DataFrame,
    rows: pd.DataFrame,
    load: str,
    names: Mapping[str, str],
    markers: Mapping[str, str],
) -> None:
    """Draw the settings of one method by model, beside Token Drop and the router's own loads."""
    d.rule(axes, 0)
    for model, curve in d.each(drops.dropna(subset=load), "model"):
        d.line(axes, curve.drop(columns=["lost_low", "lost_high"]), load, "lost", _DROP,
               marker=markers[model], **_REFERENCE)  # fmt: skip
    unlimited = rows if len(rows) else drops
    before = unlimited.groupby("model", sort=False)[f"unlimited_{load}"].mean().dropna()
    axes.plot(before, [0.0] * len(before), **_NO_LIMIT, label="no limit")
    for model, curve in d.each(rows.dropna(subset=load), "model"):
        d.line(axes, curve, load, "lost", names[model], marker=markers[model], **_COLOURED)


def _ranges(rows: pd.DataFrame) -> str:
    """Return what grows along the lines, such as ``: γ 0.5 → 2``; nothing where nothing does."""
    ends = {name: (rows[knob].min(), rows[knob].max()) for knob, name in _KNOBS.items()}
    texts = [f"{name} {low:g} → {high:g}" for name, (low, high) in ends.items() if low < high]
    return f": {', '.join(texts)}" if texts else ""
