"""The picture of README, and the numbers beside it: what a capacity costs and what it gives."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from capmoe_report.contrasts import printed_gap
from capmoe_report.effects import Effect, by_family
from capmoe_report.evidence import Side
from capmoe_report.records import record_row

from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.texts import shown
from pages import DOCS, change, paragraph, span, table
from pages.effects import anchor, replication, shared_tasks, task_titles
from pages.names import FAMILIES, exploratory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE: Final = DOCS / "pictures" / "at_a_glance.svg"
RECORDS: Final = PICTURE.with_suffix(".records.json")
"""The names of the records behind the picture, a line for each γ and method."""
_GAMMAS: Final = (1.0, 1.5, 2.0)
_TITLES: Final = {
    "score": "Token Drop",
    "reverse_order": "Reverse Order",
    "random": "Random",
    "order": "Order",
}
_OTHERS: Final = [method for method in _TITLES if method != "score"]
_STOCK: Final = Side(method="baseline")


@cache
def compared_tasks() -> frozenset[str]:
    """Return the tasks of every point of the picture, and of the numbers beside it."""
    sides = [Side(method=method, gamma=gamma) for gamma in _GAMMAS for method in _TITLES]
    return shared_tasks(exploratory().effect(side, _STOCK) for side in sides)


@cache
def effect_of(method: str, gamma: float, other: str = "") -> Effect:
    """Return the points by which a method differs from another at its γ, or from no capacity."""
    second = Side(method=other, gamma=gamma) if other else _STOCK
    return exploratory().effect(Side(method=method, gamma=gamma), second, tasks=compared_tasks())


@cache
def stragglers(method: str, gamma: float, *, before: bool = False) -> Mapping[str, float]:
    """Return the fullest rank over the mean load of each family, on the tasks of :func:`effect_of`.

    Before the drops it is that of the router's choice: the stock model has no ranks.
    """
    layers = exploratory().results.layers
    peaks = layers.groupby("cell")[f"peak.device_{'before' if before else 'after'}.mean"].mean()
    of_models = {}
    for model, tasks in effect_of(method, gamma).tasks.items():
        cells = exploratory().pick(Side(method=method, gamma=gamma), model)
        of_models[model] = float(peaks[cells["cell"][cells["task"].isin(tasks)]].mean())
    return by_family(of_models)


def picture() -> Figure:
    """Return accuracy and straggler factor by γ and method, with their bands."""
    canvas, ((cost, gain),) = d.canvas(2.7, 1, 2)
    d.rule(cost, 0, (0, (4, 2)), 0.8, "no capacity")
    for index, (method, title) in enumerate(_TITLES.items()):
        effects = [effect_of(method, gamma) for gamma in _GAMMAS]
        look = d.line_look(index, linewidth=1.4, markersize=4)
        shade = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
        ends = zip(*(effect.interval() for effect in effects), strict=True)
        cost.fill_between(_GAMMAS, *ends, **shade)
        cost.plot(_GAMMAS, [effect.points for effect in effects], **look, label=title)
        peaks = [list(stragglers(method, gamma).values()) for gamma in _GAMMAS]
        gain.plot(_GAMMAS, list(map(statistics.fmean, peaks)), **look, label=title)
        if method == "score":
            gain.fill_between(_GAMMAS, list(map(min, peaks)), list(map(max, peaks)), **shade)
    stock = stragglers("score", 1.0, before=True).values()
    d.rule(gain, statistics.fmean(stock), (0, (4, 2)), 0.8)
    gain.axhspan(min(stock), max(stock), color=d.GREY, alpha=0.15, linewidth=0)
    for axes, title, label in (
        (cost, "What it costs", "accuracy, change in points"),
        (gain, "What it gives", "fullest rank / mean load"),
    ):
        d.gamma_axis(axes, _GAMMAS)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_ylabel(label)
    d.legend(canvas, 3)
    return canvas


@cache
def sources() -> list[dict[str, Any]]:
    """Return the records behind the picture and the numbers beside it, a line each."""
    effects = {
        f"{Side(method=method, gamma=gamma)} − {_STOCK}": effect_of(method, gamma)
        for gamma in _GAMMAS
        for method in _TITLES
    }
    effects |= {_lead(other): effect_of("score", 1.0, other) for other in _OTHERS}
    return [
        record_row("at a glance", label, effect.points or 0.0, effect.records, RECORDS.parent)
        for label, effect in effects.items()
    ]


def _source(*labels: str) -> str:
    """Return where the records of effects that stand below each other are named, from docs/."""
    return f"pictures/{RECORDS.name}{anchor(sources(), 'at a glance', *labels)}"


def caption() -> str:
    """Return the sentences below README's picture."""
    effect = effect_of("score", 1.0)
    others = [-(effect_of(method, 1.0).points or 0.0) for method in _OTHERS]
    before, after = stragglers("score", 1.0, before=True), stragglers("score", 1.0)
    families = ", ".join(FAMILIES[name] for name in before)
    drop = f"docs/{_source('score γ=1 − baseline')}"
    rest = f"docs/{_source('reverse order γ=1 − baseline', 'order γ=1 − baseline')}"
    mean, interval = change(effect, 1).split(" ", 1)
    return paragraph(
        f"*{len(effect.models)} tiny trained models ({families}), {_questions()}. At γ=1 the "
        f"load of the fullest rank falls from [{_mean(before)}]({drop}) to "
        f"[{_mean(after)}]({drop}) times the mean that ranks have without a capacity. Token Drop, "
        f"which keeps the pairs with the highest gate scores, changes accuracy by [{mean}]({drop}) "
        f"{interval} points; the paper's Table 1 prints {_in_print()} for OLMoE on the same tasks. "
        f"Reverse Order, Random and Order lose [{span(others, '{:.1f}')}]({rest}). "
        "A number leads to the names of its records. Bands, "
        "left: 95 % intervals over questions. Bands, right: the lowest and the highest family, "
        "without a capacity (grey) and under Token Drop.*"
    )


def headline() -> str:
    """Return the four numbers of the overview."""
    effect = effect_of("score", 1.0)
    before, after = stragglers("score", 1.0, before=True), stragglers("score", 1.0)
    drop = _source("score γ=1 − baseline")
    points = [effect_of("score", 1.0, other).points or 0.0 for other in _OTHERS]
    lines = _source(*map(_lead, _OTHERS))
    mean, interval = change(effect, 1).split(" ", 1)
    rows = {
        f"[{_mean(before)} → {_mean(after)}]({drop})": (
            "the load of the fullest rank over the mean load before drops, at γ=1"
        ),
        f"[{mean}]({drop}) {interval} points": (
            "of accuracy: Token Drop at γ=1 against no capacity; Table 1 prints "
            f"{_in_print()} for OLMoE on the same tasks"
        ),
        f"[{span(points, '{:.1f}')}]({lines}) points": (
            "Token Drop is better than Order, Reverse Order and Random at γ=1"
        ),
        "[verdicts](zoo/replication.md)": (
            f"{replication().summary} ({len(replication().models)} models, more tasks)"
        ),
    }
    models = f"on {len(effect.models)} embedded models, {_questions()}"
    return table(("measured", models), [(f"**{number}**", text) for number, text in rows.items()])


def _questions() -> str:
    """Return the number of questions of the picture and their tasks; every point has all."""
    effects = [effect_of(method, gamma) for method in _TITLES for gamma in _GAMMAS]
    (documents,) = {effect.documents for effect in effects}
    return f"{documents:,} questions of {task_titles(compared_tasks())}"


def _lead(other: str) -> str:
    """Return the label of the lead of Token Drop at γ=1."""
    return f"{Side(method='score', gamma=1.0)} − {Side(method=other, gamma=1.0)}"


def _in_print() -> str:
    """Return what Table 1 prints for the change of Token Drop at γ=1, on the picture's tasks."""
    return shown(printed_gap("score", "baseline", 1.0, compared_tasks())[0], "{:+.1f}")


def _mean(values: Mapping[str, float]) -> str:
    return shown(statistics.fmean(values.values()), "{:.2f}")
