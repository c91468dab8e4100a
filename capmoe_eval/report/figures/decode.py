"""Generation by γ: the capacity on the prompt alone, and on every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.paper.statistics import interval, share_of
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Measured, Numbers
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import by_key, in_percent
from capmoe_eval.report.figures.shapes import scored
from capmoe_eval.report.figures.style import BLACK, column, percent, whiskers

_MODES: Final = {"unconstrained": "the prompt alone", "constrained": "every step"}
_POINTS: Final = {"markersize": 3, "elinewidth": 0.7, "capsize": 1.5}
_LOOKS: Final = {mode: style.line_look(index) | _POINTS for index, mode in enumerate(_MODES)}


def measure_decode(evidence: FigureRecords) -> Measured:
    """Collect each task's scores by γ in both modes, and what decode steps do of the damage."""
    models: list[Numbers] = []
    notes: list[str] = []
    unlimited, limited = (
        evidence.by_model(part) for part in ("generation_unlimited", "generation")
    )
    for model, title in evidence.models.items():
        baselines = {record.task: record for record in unlimited.get(model, ())}
        rising = sorted(limited.get(model, ()), key=lambda record: record.gamma or 0.0)
        of_tasks = by_key(rising, lambda record: record.task)
        tasks = []
        for task, name in evidence.tasks.items():
            own, baseline = of_tasks.get(task, []), baselines.get(task)
            told: Numbers = {"task": name, "baseline": baseline and in_percent(baseline)}
            for mode in _MODES:
                of_mode = [one for one in own if one.cell.method.decode == mode]
                told[mode] = [{"gamma": one.gamma} | in_percent(one) for one in of_mode]
            told["damage"] = [] if baseline is None else list(_damages(baseline, own))
            tasks.append(told)
            notes += [f"{title}, {name}: {line}" for line in _lacking(told["damage"])]
        models.append({"model": title, "tasks": tasks})
        notes += _steps(title, rising)
    return Measured({"models": models}, notes)


def _damages(baseline: Record, records: Sequence[Record]) -> Iterator[Numbers]:
    """Yield, at each γ with both modes, what every step loses and the decode steps' share of it.

    The share is only there where the loss is distinguishable from zero: where its 95 % interval
    lies above 0.
    """
    for gamma, same in by_key(records, lambda record: record.gamma).items():
        modes = {record.cell.method.decode: record.documents for record in same}
        if len(modes) < len(_MODES):
            continue
        told: Numbers = {"gamma": gamma, "damage": None, "share": None, "why": None}
        whole = pair([baseline.documents], [modes["constrained"]])
        of_steps = pair([modes["unconstrained"]], [modes["constrained"]])
        if isinstance(whole, Unpaired):
            told["why"] = whole.reason
        elif isinstance(of_steps, Unpaired):
            told["why"] = of_steps.reason
        else:
            lost, low, high = interval({baseline.task: whole.units})
            told["damage"] = [100 * points for points in (lost, low, high)]
            if low > 0:
                told["share"] = list(share_of(of_steps.units, whole.units, baseline.task))
            else:
                told["why"] = "the damage is not distinguishable from zero"
        yield told


def _lacking(damages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say at which γ no share is drawn, and why."""
    reasons = by_key((one for one in damages if one["why"]), lambda damage: damage["why"])
    for reason, same in reasons.items():
        yield f"no share at γ={', '.join(map(gamma_text, column(same, 'gamma')))}: {reason}."


def _steps(title: str, records: Sequence[Record]) -> Iterator[str]:
    """Say how many sequences the decode steps had, and what γ was for them after rounding."""
    noted = [
        (decode.live, record.gamma, decode.effective_gamma)
        for record in records
        if (decode := record.load.decode) and record.gamma and decode.effective_gamma
    ]
    if not noted:
        return
    live = [one[0] for one in noted]
    rounded = []
    for gamma, same in by_key(noted, lambda one: one[1]).items():
        found = [one[2] for one in same]
        ends = dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found)))
        rounded.append(f"{gamma_text(gamma)} is {' to '.join(ends)}")
    yield (
        f"{title}: a decode step has {min(live):.1f} to {max(live):.1f} live sequences, by cell, "
        f"for which γ after rounding: {', '.join(rounded)}."
    )


def draw_decode(numbers: Numbers) -> Figure:
    """Draw a model a column: the score of each task, and below the share of the decode steps."""
    models = numbers["models"]
    names = [task["task"] for task in models[0]["tasks"]]
    shared: Numbers = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, grid = style.subplots(
        style.PAGE, 1.3 * (len(names) + 1) + 0.5, len(names) + 1, len(models), **shared
    )
    gammas = []
    for model, axes in zip(models, grid.T, strict=True):
        for index, (task, panel) in enumerate(zip(model["tasks"], axes[:-1], strict=True)):
            gammas += _draw_scores(panel, task)
            look = style.line_look(len(_MODES) + index) | _POINTS | {"linestyle": ""}
            _draw_shares(axes[-1], task, 0.04 * (index - (len(names) - 1) / 2), look)
        axes[0].set_title(model["model"])
        for panel in axes:
            panel.grid()
        style.gamma_axis(axes[-1], gammas or [0.0, 1.0])
        low, high = axes[-1].get_xlim()
        axes[-1].set_xlim(low - 0.05, high + 0.05)  # for the points beside their γ
    for name, first in zip(names, grid[:-1, 0], strict=True):
        first.set_ylabel(f"{name}\nscore (%)")
    for last in grid[-1]:
        last.axhline(100, color=BLACK, linewidth=0.5)
        last.axhline(0, color=BLACK, linewidth=0.5)
    grid[-1, 0].set(ylabel="share of decode\nsteps (%)", ylim=(-30, 150))
    style.legend_below(figure, *grid[0], *grid[-1], columns=4)
    return figure


def _draw_scores(axes: Axes, task: Numbers) -> list[float]:
    """Draw one task's scores in their 95 % intervals; return the γ of its points."""
    baseline, gammas = task["baseline"], []
    if baseline:
        look: Numbers = {"color": BLACK, "linestyle": (0, (1, 2))}
        axes.axhline(baseline["value"], **look, label="no limit ± 1.96 SE")
        (value,), (reach,) = scored([baseline])
        axes.axhspan(value - reach, value + reach, color=style.GREY, alpha=0.25, linewidth=0)
    for mode, title in _MODES.items():
        places = column(task[mode], "gamma")
        label = f"capacity on {title} ± 1.96 SE"
        axes.errorbar(places, *scored(task[mode]), **_LOOKS[mode], label=label)
        gammas += places
    return gammas


def _draw_shares(axes: Axes, task: Numbers, shift: float, look: Numbers) -> None:
    """Draw the shares of one task in their 95 % intervals, beside those of the others."""
    known = [damage for damage in task["damage"] if damage["share"]]
    middle, low, high = (percent([damage["share"][end] for damage in known]) for end in range(3))
    places = [damage["gamma"] + shift for damage in known]
    axes.errorbar(places, middle, whiskers(middle, low, high), **look, label=task["task"])
