"""A γ for each layer beside one γ for all: straggler factors at equal drops, and accuracy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.sources import Sources

from capmoe_methods.trial import by_model, outcomes, primary, sentence, stragglers, verdicts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Scores are filled, and stand at the right of a budget: no colour stands alone.
_LOOKS: Final[dict[str, d.Look]] = {
    kind: {"color": colour, "markerfacecolor": face, "markersize": 4, "linestyle": ""}
    for kind, colour, face in (("pairs", d.VERMILLION, "white"), ("scores", d.BLUE, d.BLUE))
}
_SMALL: Final = {"color": d.GREY, "markersize": 2.5}
_STATIC: Final = "static"
_EVERY: Final = "mean over models"
_DIFFERENCES: Final = {
    "straggler": "straggler factor at equal drops",
    "accuracy": "points at equal straggler factor",
}


def against_static(sources: Sources) -> pd.DataFrame:
    """Return the points of each model by drops, and what budgets change against static factors.

    The rows of ``quantity`` "setting" are points of the curve, by falling drops; the others are
    differences, adaptive minus static, of each model and of all. ``budget`` is missing where it
    is of all budgets.
    """
    results = sources.results
    cells = results.cells.assign(
        straggler=stragglers(results),
        budget_of=results.cells["budget_of"].astype(object).fillna(_STATIC),
    )
    points = cells.groupby(["model", "setting", "budget_of"], sort=False).agg(
        dropped_percent=("drop_rate", "mean"),
        value=("straggler", "mean"),
        tasks=("task", "nunique"),
    )
    points = points[points["tasks"] == len(sources.tasks)].reset_index()
    points["dropped_percent"] *= 100
    order = [-points["dropped_percent"], points["model"].map([*sources.models].index)]
    points = points.assign(quantity="setting", model=points["model"].map(sources.models))
    compared = outcomes(results)
    judged = verdicts(compared)
    rows: list[dict[str, Any]] = []
    for quantity, column in (("straggler", "gain"), ("accuracy", "points")):
        for _, verdict in judged.iterrows():
            same = compared[compared["budget_of"] == verdict["budget_of"]]
            if not math.isnan(verdict["budget"]):
                same = same[same["budget"] == verdict["budget"]]
            about = {"quantity": quantity} | verdict[["budget_of", "budget"]].to_dict()
            rows += [
                about | {"model": sources.models[model], "value": value}
                for model, value in by_model(same, column).items()
            ]
            if not math.isnan(verdict[quantity]):
                ends = {f"value{end}": verdict[quantity + end] for end in ("", "_low", "_high")}
                rows.append(about | {"model": _EVERY} | ends)
    of_pairs = primary(judged)
    if of_pairs is not None:
        text = sentence(of_pairs)
        sources.notes.append(f"All budgets of pairs, tasks counting equally: {text}")
    if of_pairs is not None and not math.isnan(of_pairs["most"]):
        worst = f"{of_pairs['most']:+.3f}".replace("-", "−")
        sources.notes.append(
            "Interpolation flatters the adaptive factors: if between two static ones their curve "
            f"were as low as a convex one can be, the first difference would be {worst}."
        )
    columns = ["quantity", "model", "budget_of", "budget", "dropped_percent", "value"]
    parts = [points.iloc[np.lexsort(order)], pd.DataFrame(rows)]
    frames = [part.reindex(columns=[*columns, "value_low", "value_high"]) for part in parts]
    return pd.concat(frames, ignore_index=True)


@figure(
    "not in the paper",
    "A γ for each layer, chosen on other documents, beside one γ for all",
    against_static,
    experiment="adaptive",
    parts=("baseline", _STATIC, "adaptive"),
)
def adaptive(rows: pd.DataFrame) -> Figure:
    """Token Drop with one γ for all layers (static), and with a γ for each layer that is chosen on
    a calibration's documents so that the share of all pairs, or of the gate scores of all pairs,
    that is dropped there is within a budget (adaptive). Above: the highest load of an expert over
    the mean load before drops, mean over layers and forwards, against the share of pairs that is
    dropped on the evaluated documents, tasks counting equally. Middle: that factor minus the one of
    the static γ that drops as much. Below: accuracy minus that of the static γ with the same
    factor. The static γ is interpolated between the two of the grid around it. Grey: static
    above, else each model, mean over tasks; colours: mean over models with 95 % intervals, in the
    middle over models (t), below over documents. The first of "all" in the middle was chosen
    beforehand to decide; the others describe, and no interval is corrected for their number.
    """
    canvas, grid = d.canvas(6.4, 3, 1)
    curves, *sides = grid[:, 0]
    models = d.places(rows["model"][rows["model"] != _EVERY])
    markers = {model: d.MARKERS[place % len(d.MARKERS)] for model, place in models.items()}
    settings = rows[rows["quantity"] == "setting"].drop(columns=["value_low", "value_high"])
    looks = {_STATIC: _SMALL | {"linewidth": 0.7}} | _LOOKS
    for (model, kind), same in settings.groupby(["model", "budget_of"], sort=False):
        name = model if kind == _STATIC else ""
        look = looks[kind] | {"marker": markers[model]}
        d.line(curves, same, "dropped_percent", "value", name, **look)
    curves.set(xlabel="dropped share of pairs (%)", ylabel="fullest expert / mean load")
    for axes, (quantity, label) in zip(sides, _DIFFERENCES.items(), strict=True):
        _differences(axes, rows[rows["quantity"] == quantity], markers)
        axes.set_ylabel(f"{label}:\nadaptive − static")
    d.legend(canvas)
    return canvas


def _differences(axes: Any, rows: pd.DataFrame, markers: dict[str, str]) -> None:
    """Draw the mean of each budget with its interval, and small the models' own, by marker."""
    names = rows["budget"].map("{:.6g}".format)
    place = d.places(names)
    for shift, (kind, look) in zip((-0.17, 0.17), _LOOKS.items(), strict=True):
        of_kind = rows.assign(x=names.map(place) + shift)[rows["budget_of"] == kind]
        for model, same in d.each(of_kind, "model"):
            if model == _EVERY:
                thin = look | {"marker": "o", "linewidth": 1, "capsize": 2}
                d.line(axes, same, "x", "value", f"adaptive, budget of {kind}", **thin)
            else:
                small = _SMALL | {"marker": markers[model], "linestyle": ""}
                d.line(axes, same, "x", "value", **small)
    d.rule(axes, 0)
    ticks = ["all" if name == "nan" else f"{100 * float(name):g}" for name in place]
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel("budget (%)")
