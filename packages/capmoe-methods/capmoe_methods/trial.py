"""Judge adaptive γ against the static ones: at equal drops, and at equal straggler factors.

A static γ that drops exactly as much as an adaptive setting is hardly ever on the grid. It is
interpolated: of the two static settings around the value, each counts by its nearness (a named
choice; it is also what a server would get that used either at random). That holds for straggler
factors and, document by document, for scores. Straggler factors fall ever more slowly as drops
rise, so that the interpolation flatters the adaptive choice; :func:`least` says by how much at
most.

The cells of a model share its routers. So models are the sampling units of an interval, and tasks
and budgets are averaged before; of accuracy there is an interval over documents, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from capmoe_eval.experiment.names import is_stock
from capmoe_eval.lazy import pd
from capmoe_eval.paper.pairing import Floats, Paired, pool
from capmoe_eval.paper.statistics import mean_interval
from capmoe_eval.results.frames import Results

from capmoe_methods.comparison import Interval, interval, nearness, paired_between, peaks

_OF_CELL: Final = ("model", "task", "budget", "budget_of", "drop_rate", "straggler")
_COMPARED: Final = ("static", "gain", "most", "apart", "scores", "points")


def least(value: float, drops: Floats, stragglers: Floats) -> float | None:
    """Return what a convex curve through all points is at least at a value between two of them.

    It is above the lines through the two points before, and through the two points after, drawn on;
    where these are above the line between its neighbours, points are not convex, and that line
    counts. None where the value is beyond all points, or no such line is known.
    """
    curve = sorted(dict(zip(drops, stragglers, strict=True)).items())
    before = [point for point in curve if point[0] <= value]
    after = [point for point in curve if point[0] >= value]
    if not before or not after:
        return None
    if before[-1] == after[0]:
        return float(after[0][1])
    chord, *beside = (
        y0 + (value - x0) * (y1 - y0) / (x1 - x0)
        for (x0, y0), (x1, y1) in (
            line for line in ((before[-1], after[0]), before[-2:], after[:2]) if len(line) == 2
        )
    )
    return float(min(chord, max(beside))) if beside else None


def stragglers(results: Results) -> pd.Series[float]:
    """Return each cell's straggler factor: after drops, the mean over its layers.

    It is the fullest expert (with device-level capacities the fullest rank) over the mean load
    before drops, as a mean over forwards.
    """
    of_devices = results.cells["granularity"] == "device"
    return peaks(results, "expert").mask(of_devices, peaks(results, "device"))


def outcomes(results: Results) -> pd.DataFrame:
    """Return a row for each cell of an adaptive γ, beside the static cells of its model and task.

    Static cells have its other knobs; where they lack a neighbour, what follows from it is missing.

    - ``model``, ``task``, ``budget``, ``budget_of``, ``drop_rate``, ``straggler``: the cell's
    - ``static``: the straggler factor of the static γ with as many drops; ``gain``: minus that
    - ``most``: the gain, if the static curve between its points were lowest
    - ``apart``: how much the two static γ around it differ in drops
    - ``scores``: its scores beside those of the static γ with the same straggler factor
      (:class:`~capmoe_eval.paper.pairing.Paired`); ``points``: their mean difference in points
    """
    cells = results.cells.assign(straggler=stragglers(results))
    gamma = {"gamma", "budget", "budget_of"}
    cells["others"] = [
        str(sorted((knob, of) for knob, of in json.loads(setting).items() if knob not in gamma))
        for setting in cells["setting"]
    ]
    rows = []
    for _, same in cells.groupby(["model", "task"], sort=False):
        is_adaptive = same["budget"].notna()
        is_static = ~is_adaptive & (same["gamma"].notna() | same["method"].map(is_stock))
        for place, cell in same[is_adaptive].iterrows():
            # The stock knows no ranks, and so no loads of devices.
            is_beside = (same["others"] == cell["others"]) | (
                same["gamma"].isna() & (cell["granularity"] != "device")
            )
            static = same[is_static & is_beside]
            drops, factors = (static[name].to_numpy(float) for name in ("drop_rate", "straggler"))
            outcome: dict[str, Any] = {name: cell[name] for name in _OF_CELL}
            weight_N = nearness(cell["drop_rate"], drops)
            if weight_N is not None:
                outcome["static"] = weight_N @ factors
                outcome["gain"] = cell["straggler"] - outcome["static"]
                outcome["apart"] = np.ptp(drops[weight_N > 0])
            if (lowest := least(cell["drop_rate"], drops, factors)) is not None:
                outcome["most"] = cell["straggler"] - lowest
            scores = paired_between(
                results, cells.loc[[place]], static, nearness(cell["straggler"], factors)
            )
            if scores is not None:
                outcome |= {"scores": scores, "points": 100 * scores.differences.mean()}
            rows.append(outcome)
    return pd.DataFrame(rows, columns=[*_OF_CELL, *_COMPARED])


def verdicts(compared: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each budget, and after those of one kind one for all of them.

    - ``budget_of``, ``budget``: the budget, missing where it is of all; ``cells``: the models times
      tasks on the static curve
    - ``static``: the mean of the static straggler factors
    - ``straggler``, with ``_low`` and ``_high``: adaptive minus static at equal drops, over models
    - ``most``: the same, if the static curve between its points were lowest
    - ``accuracy``, with ``_low`` and ``_high``: in points at equal straggler factors, over
      documents

    The row of all budgets of pairs is the primary one: it was chosen before the trial.
    """
    rows = []
    for kind, of_kind in compared.groupby("budget_of"):
        for budget, same in [*of_kind.groupby("budget"), (math.nan, of_kind)]:
            on_curve = same[same["static"].notna()]
            row = {"budget_of": kind, "budget": budget}
            row["cells"] = len(on_curve[["model", "task"]].drop_duplicates())
            row |= {name: by_model(on_curve, name).mean() for name in ("static", "most")}
            for name, numbers in (
                ("straggler", mean_interval(by_model(on_curve, "gain").tolist())),
                ("accuracy", _accuracy(same)),
            ):
                ends = (name, f"{name}_low", f"{name}_high")
                row |= dict(zip(ends, numbers or (math.nan,) * 3, strict=True))
            rows.append(row)
    return pd.DataFrame(rows)


def primary(judged: pd.DataFrame) -> Mapping[Any, Any] | None:
    """Return the verdict that was chosen before the trial: of all budgets of pairs."""
    rows = judged.query("budget_of == 'pairs' and budget.isna()") if len(judged) else judged
    return None if rows.empty else rows.iloc[0].to_dict()


def by_model(compared: pd.DataFrame, column: str) -> pd.Series[float]:
    """Return each model's mean of a column: over budgets, then over tasks."""
    present = compared.dropna(subset=column)
    of_cells = present.groupby(["model", "task"], sort=False)[column].mean()
    means: pd.Series[float] = of_cells.astype(float).groupby("model", sort=False).mean()
    return means


def sentence(verdict: Mapping[str, Any]) -> str:
    """Return a verdict in a sentence or two."""
    if math.isnan(verdict["straggler"]):
        return "No difference in straggler factors is known of two models."
    low, high = verdict["straggler_low"], verdict["straggler_high"]
    conclusion = "a gain" if high < 0 else "a loss" if low > 0 else "no gain"
    text = (
        f"At equal drops the straggler factor changes by {_signed(verdict, 'straggler', 3)}, of "
        f"{verdict['static']:.2f}: {conclusion} is shown."
    )
    if not math.isnan(verdict["accuracy"]):
        points = _signed(verdict, "accuracy", 2)
        text += f" At equal straggler factors accuracy changes by {points} points."
    return text


def _accuracy(compared: pd.DataFrame) -> Interval | None:
    """Return the points over documents, each model and task by its mean over budgets."""
    models: dict[str, dict[str, Paired]] = {}
    scored = compared[compared["scores"].notna()]
    for (model, task), same in scored.groupby(["model", "task"], sort=False)["scores"]:
        units = np.mean([scores.units for scores in same], axis=0)
        paired = Paired(same.iloc[-1].documents, units, np.zeros(len(units)))
        models.setdefault(model, {})[task] = paired
    parts = sorted(pool(models).items())
    pooled = {task: 100 * len(parts) * units for (task, _), units in parts}
    return interval(pooled) if pooled else None


def _signed(verdict: Mapping[str, Any], name: str, digits: int) -> str:
    mean, low, high = (
        f"{verdict[name + end]:+.{digits}f}".replace("-", "−") for end in ("", "_low", "_high")
    )
    return f"{mean} [{low}, {high}]"
