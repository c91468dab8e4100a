"""A γ for each layer beside one γ for all: straggler factors at equal drops, and accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from itertools import cycle
from typing import Final, NamedTuple

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.statistics import Interval
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, by_task, mean_load

from capmoe_methods.trial import (
    AdaptiveOutcome,
    AdaptiveVerdict,
    budget_in,
    by_model,
    outcomes,
    points,
    primary,
    straggler,
    verdicts,
)

# Scores are filled, and stand at the right of a budget: no colour stands alone.
_LOOKS: Final[dict[str, p.Look]] = {
    kind: {"color": colour, "markerfacecolor": face, "markersize": 4, "linestyle": ""}
    for kind, colour, face in (
        ("pairs", p.VERMILLION, "white"),
        ("scores", p.BLUE, p.BLUE),
    )
}
_SMALL: Final = {"color": p.GREY, "markersize": 2.5}


class _Point(NamedTuple):
    """One setting of one model, tasks counting equally."""

    budget_of: str | None  # None: one γ for all layers
    drop_rate: float
    straggler: float


def adaptive(evidence: FigureRecords) -> p.Picture:
    """Return the curve of static factors of each model, and what budgets change against it."""
    of_models = evidence.by_model("baseline", "static", "adaptive")
    compared = outcomes(record for records in of_models.values() for record in records)
    judged = verdicts(compared)
    markers = dict(zip(evidence.models, cycle(p.MARKERS), strict=False))
    curves = []
    for model, title in evidence.models.items():
        settings = _points(of_models.get(model, ()), evidence.tasks)
        looks: dict[str | None, p.Look] = {None: _SMALL | {"linewidth": 0.7}}
        looks.update(_LOOKS)
        for kind, look in looks.items():
            kind_points = [point for point in settings if point.budget_of == kind]
            drops = p.percent([point.drop_rate for point in kind_points])
            factors, name = [point.straggler for point in kind_points], "" if kind else title
            curves.append(p.Curve(name, drops, factors, look=look | {"marker": markers[model]}))
    verdict = primary(judged)
    notes = [] if verdict is None else [f"All budgets of pairs, tasks counting equally: {verdict}"]
    if verdict is not None and verdict.straggler_most is not None:
        worst = f"{verdict.straggler_most:+.3f}".replace("-", "−")
        notes.append(
            "Interpolation flatters the adaptive factors: if between two static ones their curve "
            f"were as low as a convex one can be, the first difference would be {worst}."
        )
    sides = [
        p.Panel(
            "",
            curves,
            p.Axis("dropped share of pairs (%)"),
            p.Axis("fullest expert / mean load"),
        ),
        _differences(
            "straggler factor at equal drops",
            judged,
            compared,
            markers,
            lambda verdict: verdict.straggler,
            lambda outcome: outcome.gain,
        ),
        _differences(
            "points at equal straggler factor",
            judged,
            compared,
            markers,
            lambda verdict: verdict.accuracy,
            points,
        ),
    ]
    return p.Picture([sides], notes, height=3.0, look={"legend": 3})


def _points(records: Sequence[Record], tasks: Collection[str]) -> list[_Point]:
    """Return the points of one model by falling drop rate."""
    settings = []
    for method, same in by_key(records, lambda record: record.cell.method).items():
        drop_rate = mean_load(same, tasks, "drop_rate")
        if drop_rate is not None:
            factor = statistics.fmean(straggler(r) for (r,) in by_task(same, tasks))
            settings.append(_Point(budget_in(method)[1], drop_rate, factor))
    return sorted(settings, key=lambda point: -point.drop_rate)


def _differences(
    name: str,
    judged: Sequence[AdaptiveVerdict],
    compared: Sequence[AdaptiveOutcome],
    markers: dict[str, str],
    mean_of: Callable[[AdaptiveVerdict], Interval | None],
    of_outcome: Callable[[AdaptiveOutcome], float | None],
) -> p.Panel:
    """Return the mean of each budget with its interval, and small the models' own, by marker."""
    places = list(dict.fromkeys(verdict.budget for verdict in judged))
    marks: list[p.Mark] = []
    for shift, (kind, look) in zip((-0.17, 0.17), _LOOKS.items(), strict=True):
        verdict_at = {
            places.index(verdict.budget) + shift: verdict
            for verdict in judged
            if verdict.budget_of == kind
        }
        of_models = {
            place: by_model(
                [
                    outcome
                    for outcome in compared
                    if outcome.budget_of == kind and verdict.budget in (None, outcome.budget)
                ],
                of_outcome,
            )
            for place, verdict in verdict_at.items()
        }
        for model, marker in markers.items():
            means = {at: values[model] for at, values in of_models.items() if model in values}
            small = _SMALL | {"marker": marker, "linestyle": ""}
            marks.append(p.Curve("", [*means], [*means.values()], look=small))
        mean_at = {
            place: mean for place, v in verdict_at.items() if (mean := mean_of(v)) is not None
        }
        if mean_at:
            thin = look | {"marker": "o", "linewidth": 1, "capsize": 2}
            middle, low, high = zip(*mean_at.values(), strict=True)
            name_of = f"adaptive, budget of {kind}"
            marks.append(p.Curve(name_of, [*mean_at], middle, low, high, thin))
    marks.append(p.rule(0))
    ticks = ["all" if place is None else f"{100 * place:g}" for place in places]
    across = p.Axis("budget (%)", range(len(places)), ticks)
    return p.Panel("", marks, across, p.Axis(f"{name}:\nadaptive − static"))
