"""Routing without a limit: what would be dropped and padded (Figures 7, 17-20), gate scores (8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from matplotlib import colormaps

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import panels as p
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import PooledGrid, by_key, by_layer, layers_of, pooled_grid

PENALTIES: Final = (1.0, 5.0, 20.0)
"""The textbook's λ: how many empty slots a dropped assignment is worth."""
_SWEEP: Final = tuple(10 ** (step / 20) for step in range(-20, 41))
_SHARES: Final = p.Axis("dropped (%)", limits=(0, 100))


def _drops(name: str, grid: PooledGrid, **look: object) -> p.Curve:
    return p.Curve(name, grid.gamma, p.percent(grid.drop_rate), look=look)


def by_task(evidence: FigureRecords) -> p.Picture:
    """Return Figure 7: each model's dropped share on each dataset and on all together."""
    of_models = evidence.by_model("routing")
    tasks = list(dict.fromkeys(r.task for records in of_models.values() for r in records))
    panels = []
    for model, records in of_models.items():
        everything = pooled_grid(layers_of(records))
        curves = [
            _drops(
                evidence.tasks[record.task],
                pooled_grid(record.layers),
                **p.line_look(place, 6, markevery=(place % 4, 4), linewidth=0.8),
            )
            for place, record in sorted((tasks.index(r.task), r) for r in records)
        ]
        across = p.gamma_axis(everything.gamma)
        curves.append(_drops("all tasks", everything, color=p.BLACK))
        y = p.Axis(limits=_SHARES.limits)
        panels.append(p.Panel(evidence.models[model], curves, across, y))
    legend, layout = 7 if len(panels) > 1 else 4, {"sharey": True}
    return p.in_rows(panels, 1.75, "dropped (%)", legend=legend, layout=layout)


def by_layers(evidence: FigureRecords) -> p.Picture:
    """Return one of Figures 17 to 20: a model's dropped share in each layer over all datasets."""
    records = evidence.of_model("routing")
    everything = pooled_grid(layers_of(records))
    layers = by_layer(records)
    count = len(layers)
    shades = [colormaps["viridis_r"](0.12 + 0.88 * i / max(1, count - 1)) for i in range(count)]
    is_few = count <= len(p.MARKERS)
    marks: list[p.Mark] = []
    for number, same in enumerate(layers):
        look = {"color": shades[number], "linewidth": 0.8, "markevery": (number % 4, 4)}
        marker = {"marker": p.MARKERS[number]} if is_few else {}
        name = f"MoE layer {number + 1}" if is_few else ""
        marks.append(_drops(name, pooled_grid(same), **look, **marker))
    marks.append(_drops("all layers", everything, color=p.BLACK, linestyle="--"))
    if not is_few:
        marks.append(p.Scale("MoE layer", {"shades": shades}))
    title = f"{evidence.title}, {len(records)} tasks"
    across = p.gamma_axis(everything.gamma)
    panel = p.Panel(title, marks, across, _SHARES, look={"legend": {}})
    return p.Picture([[panel]], width=p.COLUMN, height=2.1)


def best_gamma(grid: PooledGrid, penalty: float) -> float | None:
    """Return the γ that minimises ``penalty · drop rate + padding waste``.

    The penalty is λ, the cost of a dropped share in units of an empty share. The smallest of equal
    γ is taken; one without slots (0) has no padding waste and is no candidate. None if all are so.
    """
    costs = [
        (penalty * drop + waste, gamma)
        for gamma, drop, waste in zip(*grid, strict=True)
        if waste is not None
    ]
    return min(costs)[1] if costs else None


def waste(evidence: FigureRecords) -> p.Picture:
    """Return padding against drops with the best γ marked, and the best γ by penalty."""
    left: list[p.Mark] = []
    right: list[p.Mark] = []
    notes = []
    for index, (model, records) in enumerate(evidence.by_model("routing").items()):
        title, grid = evidence.models[model], pooled_grid(layers_of(records))
        best = {penalty: best_gamma(grid, penalty) for penalty in PENALTIES}
        look = p.line_look(index)
        wastes, drops = p.percent(grid.pad_waste), p.percent(grid.drop_rate)
        left.append(
            p.Curve(title, wastes, drops, look=look | {"markersize": 2.2, "linewidth": 0.8})
        )
        ring = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "color": look["color"]}
        rings = [place for place, gamma in enumerate(grid.gamma) if gamma in best.values()]
        x, y = ([of[place] for place in rings] for of in (wastes, drops))
        left.append(p.Curve("", x, y, look=ring | {"linestyle": ""}))
        sweep = {penalty: best_gamma(grid, penalty) for penalty in _SWEEP}
        apart = [gamma and gamma + 0.02 * index for gamma in sweep.values()]  # equals hide
        look = {"color": look["color"], "linestyle": look["linestyle"], "drawstyle": "steps-mid"}
        right.append(p.Curve("", list(sweep), apart, look=look))
        at_end = [f"{penalty:g}" for penalty, gamma in best.items() if gamma == grid.gamma[-1]]
        if at_end:
            notes.append(
                f"{title}: the best γ is the largest of the grid, {gamma_text(grid.gamma[-1])}, "
                f"for λ = {', '.join(at_end)}; a larger one may be better."
            )
    sides = [
        p.Panel(
            "γ from 0.25 (top left) in steps of 0.25; rings: best γ for λ = 1, 5, 20",
            left,
            p.Axis("padding waste: empty slots (%)"),
            p.Axis("drop rate (%)", limits=(-2, None)),
        ),
        p.Panel(
            "γ that minimises λ · drop rate + waste",
            right,
            p.Axis(
                "penalty λ of a drop",
                [0.1, 1, 5, 20, 100],
                ["0.1", "1", "5", "20", "100"],
                is_log=True,
            ),
            p.Axis("best γ"),
        ),
    ]
    return p.Picture([sides], notes, look={"legend": 4, "layout": {"width_ratios": [3, 2]}})


def gate_scores(evidence: FigureRecords) -> p.Picture:
    """Return Figure 8: the mean score of a token's highest, second, … expert, over its tokens."""
    panels, notes = [], []
    for model, records in evidence.by_model("routing").items():
        title = evidence.models[model]
        by_presence = by_key(records, lambda r: all(layer.score_by_rank for layer in r.layers))
        if lacking := [record.task for record in by_presence.get(False, ())]:
            notes.append(
                f"{title}: no scores by rank in the records of {', '.join(lacking)}; compute them "
                "anew with overwrite=true."
            )
        if True in by_presence:
            panels.append(_scores_by_rank(title, by_presence[True]))
    if not panels:
        raise UsageError(f"fig8: {notes[0]}")
    picture = p.in_rows(panels, 1.8, "gate score", legend=2)
    return replace(picture, notes=notes)


def _scores_by_rank(title: str, records: Sequence[Record]) -> p.Panel:
    """Return the mean over all layers, and the lowest and highest layer's mean, at each rank."""
    layers = [
        np.average([layer.score_by_rank or () for layer in same], 0, [la.tokens for la in same])
        for same in by_layer(records)
    ]
    mean, top_k = np.mean(layers, axis=0).tolist(), records[0].layers[0].top_k
    ranks = range(1, len(mean) + 1)
    band = {"color": p.SKY, "alpha": 0.5, "linewidth": 0}
    low, high = np.min(layers, axis=0), np.max(layers, axis=0)
    # Above the panel: a model with few experts leaves no space within it.
    words = f"k = {top_k}, beyond: {100 * (1 - sum(mean[:top_k]) / sum(mean)):.0f} %"
    if top_k < len(mean):
        words = f"rank k+1 / rank k: {mean[top_k] / mean[top_k - 1]:.2f}\n{words}"
    return p.Panel(
        f"{title}\n{words}",
        [
            p.Band("lowest to highest layer", low.tolist(), high.tolist(), ranks, band),
            p.Curve("mean", ranks, mean, look={"color": p.BLUE, "marker": "o", "markersize": 1.8}),
            p.rule(top_k + 0.5, "--", 0.7, is_upright=True),
        ],
        p.Axis("rank of the expert", whole=5),
        p.Axis(limits=(0, None)),
        look={"grid": None, "title": {"fontsize": 6.5}},
    )
