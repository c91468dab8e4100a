"""Mean scores by γ (Figure 12), by rounds (Figure 7 of v1), by peak load, and by batches."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import (
    gamma_suffix,
    gamma_text,
    is_stock,
    method_title,
    metric_title,
)
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, answered, pair
from capmoe_eval.paper.printed import published_note, table1_scores
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures import pooling
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import Percent
from capmoe_eval.routing.registry import method_names

# Each method looks the same whichever others are there.
_LOOKS: Final = {
    method: p.line_look(index, linewidth=0.7, markersize=3.6) | {"linestyle": "-"}
    for index, method in enumerate(name for name in method_names() if not is_stock(name))
}
for _method in ("expanded_drop", "token_reroute", "device_drop"):
    _LOOKS[_method]["markerfacecolor"] = "white"
_LOOKS["baseline"] = {"color": p.BLACK, "linestyle": "", "marker": "*", "markersize": 7}
_FRONT: Final = {"color": p.GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"}
PEAK: Final = p.Axis("mean peak load of an expert / mean load")
"""The axis of Pareto fronts."""


def scored(name: str, x: Iterable[float], scores: Sequence[Percent], **look: object) -> p.Curve:
    """Return a curve of scores with whiskers of 1.96 standard errors."""
    values, reach = [s.value for s in scores], [1.96 * (s.stderr or 0.0) for s in scores]
    low, high = ([v + sign * r for v, r in zip(values, reach, strict=True)] for sign in (-1, 1))
    return p.Curve(name, list(x), values, low, high, {"elinewidth": 0.7, "capsize": 1.5} | look)


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the places of the points (cost, quality) that no other beats.

    A point is beaten by one that costs no more and is no worse, and differs.
    """
    return {
        place
        for place, (cost, quality) in enumerate(points)
        if not any(
            other != (cost, quality) and other[0] <= cost and other[1] >= quality
            for other in points
        )
    }


def front(points: Sequence[tuple[float, float]]) -> p.Curve:
    """Return the Pareto front of points (peak load, score), in grey below their lines."""
    x, y = zip(*sorted(points[place] for place in pareto_front(points)), strict=True)
    return p.Curve("Pareto front", x, y, look=_FRONT | {"zorder": 1})


def curves(evidence: FigureRecords) -> p.Picture:
    """Return Figure 12: each model's scores under Token Drop by γ, and what was dropped.

    The mean is drawn where all tasks are there. A model without a record with a capacity is left
    out; a UsageError if all are.
    """
    notes: list[str] = []
    # γ=∞ is the baseline, which the figure has anyway.
    of_models = {
        model: curve
        for model, records in evidence.by_model("curve").items()
        if (curve := [record for record in records if record.gamma is not None])
    }
    if not of_models:
        more = "; ".join(evidence.absent[:2])
        raise UsageError(f"fig12: its curves have no record; compute them: {more}")
    is_rounded = all(r.load.effective_gamma is not None for rs in of_models.values() for r in rs)
    unlimited = evidence.by_model("unlimited")
    upper, lower = [], []
    for model, title in evidence.models.items():
        if model in of_models:
            stock = pooling.mean_score(unlimited.get(model, ()), evidence.tasks)
            scores, drops = _curve(evidence, model, of_models[model], stock, is_rounded, notes)
            upper.append(p.Panel(title, scores))
            lower.append(p.Panel("", [drops] if drops else []))
        else:
            notes.append(f"{title} is left out: it has no record.")
    gammas = [x for panel in (*upper, *lower) for mark in panel.marks[:-1] for x in _gammas(mark)]
    across = p.gamma_axis([0.0, 3.0, *gammas])
    if is_rounded:
        across = replace(across, label="γ after rounding")
    lower = [replace(panel, x=across, y=p.Axis(limits=(0, 105))) for panel in lower]
    upper[0] = replace(upper[0], y=p.Axis("score (%)"))
    lower[0] = replace(lower[0], y=p.Axis("dropped (%)", limits=(0, 105)))
    layout = {"sharex": True, "sharey": "row", "height_ratios": [3, 1]}
    width = p.PAGE if len(upper) > 1 else p.COLUMN
    return p.Picture(
        [upper, lower], notes, width=width, height=3.1, look={"legend": 5, "layout": layout}
    )


def _gammas(mark: p.Mark) -> Sequence[float]:
    return [x for x in mark.x if x is not None] if isinstance(mark, p.Curve) else ()


def _curve(
    evidence: FigureRecords,
    model: str,
    records: Sequence[Record],
    stock: Percent | None,
    is_rounded: bool,
    notes: list[str],
) -> tuple[list[p.Mark], p.Curve | None]:
    """Return one model's curves and its drop rates; note the γ at which tasks are missing."""
    tasks, title = evidence.tasks, evidence.models[model]

    def x(record: Record) -> float:
        return (record.load.effective_gamma if is_rounded else record.gamma) or 0.0

    rising = sorted(records, key=lambda record: record.gamma or 0.0)
    of_tasks = pooling.by_key(rising, lambda record: record.task)
    marks: list[p.Mark] = [
        p.Curve(
            tasks[task],
            [x(record) for record in of_tasks.get(task, ())],
            [100 * record.value for record in of_tasks.get(task, ())],
            look=p.line_look(index, 6, markersize=2.2, linewidth=0.6),
        )
        for index, task in enumerate(tasks)
    ]
    gammas, scores, rates = [], [], []
    lacking: dict[str, list[str]] = {}
    for gamma, same in pooling.by_key(rising, lambda record: record.gamma).items():
        if score := pooling.mean_score(same, tasks):
            rounded = pooling.mean_load(same, tasks, "effective_gamma")
            gammas.append((rounded if is_rounded else gamma) or 0.0)
            scores.append(score)
            rates.append(pooling.mean_load(same, tasks, "drop_rate"))
        else:
            here = {record.task for record in same}
            names = ", ".join(name for task, name in tasks.items() if task not in here)
            lacking.setdefault(names, []).append(gamma_text(gamma))
    notes += [f"{title}: no mean at γ={', '.join(at)}: {of} missing." for of, at in lacking.items()]
    drops = None
    if scores:
        marks.append(scored("mean ± 1.96 SE", gammas, scores, color=p.BLACK, linewidth=1.4))
        look: p.Look = {"color": p.BLACK, "marker": "o", "markersize": 2}
        drops = p.Curve("", gammas, p.percent(rates), look=look)
    if stock:
        marks.append(p.rule(stock.value, (0, (1, 2)), 1.0, "mean, no limit"))
    if published := table1_scores(model, list(tasks.values())):
        look = {"color": p.BLACK, "marker": "*", "linestyle": "", "markersize": 6}
        look |= {"markerfacecolor": "white"}
        values = published["gamma"], published["value"]
        marks.append(p.Curve("mean, paper's Table 1", *values, look=look))
        notes.append(published_note("table1"))
    return marks, drops


def rounds(evidence: FigureRecords) -> p.Picture:
    """Return v1's Figure 7: score and lost pairs by rounds; one round is Token Drop."""
    tasks = evidence.tasks
    records = evidence.of_model("one_round", "rounds")
    notes = []
    points: dict[int, tuple[Percent, float | None, float]] = {}
    of_rounds = pooling.by_key(records, lambda record: getattr(record.cell.method, "rounds", 1))
    for number, same in sorted(of_rounds.items()):
        if score := pooling.mean_score(same, tasks):
            dropped = pooling.mean_load(same, tasks, "drop_rate")
            points[number] = score, dropped, _unserved(same, tasks)
        else:
            notes.append(f"No mean after {number} rounds: not every task is there.")
    scores, dropped_shares, unserved = zip(*points.values(), strict=True) if points else ((),) * 3
    name = f"{method_title('token_reroute')} ± 1.96 SE"
    above: list[p.Mark] = [scored(name, points, scores, color=p.BLUE, marker="o", capsize=2)]
    if stock := pooling.mean_score(evidence.of_model("baseline"), tasks):
        above.append(p.rule(stock.value, ":", 1.0, "no limit"))
    below = [
        p.Curve(name, list(points), p.percent(shares), look=look)
        for name, shares, look in (
            (
                "top-k pairs dropped",
                dropped_shares,
                {"marker": "s", "linestyle": "--", "color": p.VERMILLION},
            ),
            ("of them not replaced", unserved, {"marker": "^", "color": p.BLUE}),
        )
    ]
    names = [f"1 ({method_title('score')})" if n == 1 else str(n) for n in points]
    gamma = gamma_suffix(pooling.shared_gamma(records), ", γ = ")
    upper = p.Panel(
        f"{evidence.title}, {len(tasks)} tasks{gamma}",
        above,
        y=p.Axis("mean score (%)", margin=0.15),
        look={"grid": "y"},
    )
    shares = p.Axis("share (%)", limits=(0, None), margin=0.2)
    lower = p.Panel("", below, p.Axis("rounds", list(points), names), shares, look={"grid": "y"})
    layout = {"sharex": True, "height_ratios": [3, 2]}
    look = {"legend": 2, "layout": layout}
    return p.Picture([[upper], [lower]], notes, width=p.COLUMN, height=2.6, look=look)


def _unserved(records: Sequence[Record], tasks: Collection[str]) -> float:
    """Return the share of T·K that no expert computes, tasks counting equally.

    Dropped pairs less those computed elsewhere instead; after one round, the drop rate.
    """
    shares = []
    for same in pooling.by_task(records, tasks):
        layers = pooling.layers_of(same)
        computed = sum(sum(layer.load_after) for layer in layers)
        shares.append(1 - computed / float(sum(layer.assignments for layer in layers)))
    return statistics.fmean(shares)


def methods(evidence: FigureRecords) -> p.Picture:
    """Return mean score against mean peak load: a line for each method, and the front."""
    tasks = evidence.tasks
    notes = []
    points: dict[str, list[tuple[float, float]]] = {}
    groups = pooling.by_key(
        evidence.of_model("baseline", "methods", "at_random"),
        lambda r: ("device_drop" if r.cell.method.granularity == "device" else r.method, r.gamma),
    )
    for (method, gamma), same in groups.items():
        peak = pooling.mean_load(same, tasks, "mean_peak_after")
        if (score := pooling.mean_score(same, tasks)) and peak is not None:
            points.setdefault(method, []).append((peak, score.value))
        else:
            title = _title(method) + gamma_suffix(gamma, " at γ=")
            notes.append(f"{title} is left out: not every task is there.")
    every = [point for line in points.values() for point in line]
    lines = [
        p.Curve(_title(method), [x for x, _ in line], [y for _, y in line], look=look)
        for method, look in _LOOKS.items()
        if (line := sorted(points.get(method, ())))
    ]
    title = f"{evidence.title}, {len(tasks)} tasks"
    marks = [front(every), *lines] if every else lines
    panel = p.Panel(title, marks, PEAK, p.Axis("mean score (%)"))
    return p.Picture([[panel]], notes, width=p.COLUMN, height=3.2, look={"legend": 2})


def _title(method: str) -> str:
    """Return a method's printed name, with its name as a selection metric where that is another."""
    title, metric = method_title(method), metric_title(method)
    return title if title == metric else f"{title} ({metric})"


def companions(evidence: FigureRecords) -> p.Picture:
    """Return how many answers differ between settings of the batch, and by how much the score.

    Every pair of settings of a method is compared, over batch sizes and over shuffles; whiskers
    reach from the lowest to the highest pair.
    """
    notes: list[str] = []
    parts = {part: evidence.of_model(part) for part in ("batch_sizes", "shuffles")}
    everything = evidence.of_model(*parts)
    names = list(dict.fromkeys(record.method for record in everything))
    flips, ranges = [], []
    for records, shift, look, label in zip(
        parts.values(),
        (-0.2, 0.2),
        (p.bar_look(p.BLUE), p.bar_look(p.SKY, "////")),
        ("by length", "by length and at random"),
        strict=True,
    ):
        sizes = ", ".join(map(str, sorted({int(r.cell.batch_size) for r in records})))
        spreads = {place + shift: _spread(records, name, notes) for place, name in enumerate(names)}
        spread_at = {place: spread for place, spread in spreads.items() if spread is not None}
        rates = [p.percent(rates) for rates, _ in spread_at.values()]
        mean = [statistics.fmean(shares) for shares in rates]
        low, high = [min(shares) for shares in rates], [max(shares) for shares in rates]
        look["error_kw"] = {"elinewidth": 0.7, "capsize": 2}
        flips.append(
            p.Bars(f"{label}, batches of {sizes}", [*spread_at], mean, 0.38, 0, low, high, look)
        )
        ranges.append(
            p.Bars("", [*spread_at], [spread for _, spread in spread_at.values()], 0.38, look=look)
        )
    if not any(bars.x for bars in flips):
        raise UsageError(
            "companions: no method has two settings with the same documents; measure them: "
            + "; ".join(evidence.absent[:2])
        )
    across = p.Axis(
        ticks=range(len(names)),
        names=[method_title(name).replace(" ", "\n") for name in names],
        is_bare=True,
    )
    gamma = gamma_suffix(pooling.shared_gamma(everything), ", γ = ")
    sides = [
        p.Panel(title, marks, across, p.Axis(label, limits=(0, None)), look={"grid": "y"})
        for title, marks, label in (
            (
                f"{evidence.title}, {everything[0].n:,} documents{gamma}",
                flips,
                "answers that flip (%)",
            ),
            ("", ranges, "score range (points)"),
        )
    ]
    layout = {"width_ratios": [3, 2]}
    return p.Picture([sides], notes, height=2.1, look={"legend": 2, "layout": layout})


def _spread(
    records: Sequence[Record], method: str, notes: list[str]
) -> tuple[list[float], float] | None:
    """Return the flip rates of a method's pairs and the range of its scores; None without pairs."""
    record_of = {_setting(record): record for record in records if record.method == method}
    rates: list[float] = []
    for settings in itertools.combinations(record_of, 2):
        paired = pair(*([answered(record_of[setting].documents)] for setting in settings))
        if isinstance(paired, Unpaired):
            both = " and ".join(settings)
            notes.append(f"{method_title(method)}: {both} are not compared: {paired.reason}.")
        else:
            rates.append(paired.flips)
    scores = [100 * record.value for record in record_of.values()]
    return (rates, max(scores) - min(scores)) if rates else None


def _setting(record: Record) -> str:
    cell = record.cell
    dealt = "by length" if cell.shuffle is None else f"shuffle {cell.shuffle}"
    return f"batch {cell.batch_size}, {dealt}"
