"""Generation by γ: the capacity on the prompt alone, and on every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capmoe_eval.experiment.names import gamma_text, is_stock
from capmoe_eval.paper.pairing import Unpaired, answered_by_cells, pair
from capmoe_eval.paper.statistics import Interval, interval, share_of
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.scores import with_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from capmoe_eval.report.figures.evidence import FigureRecords

_MODES: Final = {"unconstrained": "the prompt alone", "constrained": "every step"}
_NO_LIMIT: Final = "no limit"
_POINTS: Final = {"markersize": 3, "elinewidth": 0.7, "capsize": 1.5}


def by_mode(sources: FigureRecords) -> pd.DataFrame:
    """Return each task's scores by γ in both modes, and what decode steps do of the damage.

    ``steps_percent`` is a column of the rows of every step.
    """
    import pandas as pd

    parts = []
    limited, stock = sources.cells("generation"), sources.cells("generation_unlimited")
    for model, title in sources.models.items():
        for task, name in sources.tasks.items():
            cells = pd.concat([of for of in (limited, stock) if len(of)])
            cells = cells[(cells["model"] == model) & (cells["task"] == task)]
            cells = cells.sort_values("gamma", kind="stable")
            cells["decode"] = cells["decode"].fillna("unconstrained")
            if cells.empty:
                continue
            rows = pd.DataFrame(
                {
                    "model": title,
                    "task": name,
                    "capacity_on": cells["decode"]
                    .map(_MODES)
                    .where(~cells["method"].map(is_stock), _NO_LIMIT),
                    "gamma": cells["gamma"],
                    "score": 100 * cells["value"],
                    "stderr": 100 * cells["stderr"].astype(float),
                }
            )
            reasons: dict[str, list[str]] = {}
            for number, share in _shares(sources, cells).items():
                if isinstance(share, str):
                    reasons.setdefault(share, []).append(gamma_text(rows["gamma"][number]))
                else:
                    for end, value in zip(("", "_low", "_high"), share, strict=True):
                        rows.loc[number, f"steps_percent{end}"] = 100 * value
            parts.append(rows)
            for reason, at in reasons.items():
                points = ", ".join(at)
                sources.notes.append(f"{title}, {name}: no share at γ={points}: {reason}.")
        sources.notes.extend(_steps(title, limited[limited["model"] == model]))
    frame = with_interval(pd.concat(parts, ignore_index=True), "score")
    shares = [f"steps_percent{end}" for end in ("", "_low", "_high")]
    return frame.reindex(columns=list(dict.fromkeys([*frame, *shares])))


def _shares(sources: FigureRecords, cells: pd.DataFrame) -> dict[Any, Interval | str]:
    """Return the decode steps' share of the damage, or why it is not known, by row of every step.

    The share is only known where the damage of every step is distinguishable from zero: where its
    95 % interval lies above 0.
    """
    answers = {
        number: next(iter(answered_by_cells(sources.results, cells.loc[[number]]).values()))
        for number in cells.index
    }
    baseline = next((answers[n] for n in cells.index[cells["method"].map(is_stock)]), None)
    shares: dict[Any, Interval | str] = {}
    for _, same in cells.groupby("gamma", sort=False):
        number = {mode: number for number, mode in same["decode"].items()}
        if baseline is None or len(number) < len(_MODES):
            continue
        prompt, every = (answers[number[mode]] for mode in _MODES)
        whole, of_steps = pair(baseline, every), pair(prompt, every)
        task, row = cells["task"].iloc[0], number["constrained"]
        if isinstance(whole, Unpaired) or isinstance(of_steps, Unpaired):
            shares[row] = next(p.reason for p in (whole, of_steps) if isinstance(p, Unpaired))
        elif interval({task: whole.units}).low > 0:
            shares[row] = share_of(of_steps.units, whole.units, task)
        else:
            shares[row] = "the damage is not distinguishable from zero"
    return shares


def _steps(title: str, cells: pd.DataFrame) -> list[str]:
    """Say how many sequences the decode steps had, and what γ was for them after rounding."""
    names = "load.decode.live", "load.decode.effective_gamma"
    if not set(names) <= set(cells):
        return []
    steps = cells[["gamma", *names]].astype(float).dropna()
    steps = steps[(steps["gamma"] > 0) & (steps[names[1]] > 0)].sort_values("gamma", kind="stable")
    if steps.empty:
        return []
    live = steps[names[0]]
    rounded = []
    for gamma, same in steps.groupby("gamma", sort=False):
        ends = dict.fromkeys(f"{end:.2f}" for end in (same[names[1]].min(), same[names[1]].max()))
        rounded.append(f"{gamma_text(gamma)} is {' to '.join(ends)}")
    return [
        f"{title}: a decode step has {live.min():.1f} to {live.max():.1f} live sequences, by cell, "
        f"for which γ after rounding: {', '.join(rounded)}."
    ]


@figure(
    "not in the paper", "Generation with a capacity on the prompt alone, and on every step",
    by_mode, parts=["generation_unlimited", "generation"], tasks=["gsm8k", "nq_open", "mts_dialog"],
)  # fmt: skip
def decode(rows: pd.DataFrame) -> Figure:
    """Score of each task under Token Drop by γ, with a capacity for the prompt alone
    (decode=unconstrained) and for every step (constrained). Up to 64 sequences are generated
    together as one group; those that have finished leave it. Bottom: what the decode steps add to
    the damage, as a share of the damage of every step, paired by document. It is there where the 95
    % interval of that damage lies above zero. Whiskers: 95 % intervals over documents, which may go
    beyond the panel. Points of one γ are set apart.
    """
    models, tasks = d.places(rows["model"]), d.places(rows["task"])
    layout = {"sharex": True, "sharey": "row"}
    height = 1.3 * (len(tasks) + 1) + 0.5
    canvas, grid = d.canvas(d.PAGE, height, len(tasks) + 1, len(models), **layout)
    for (title, task), same in rows.groupby(["model", "task"], sort=False):
        column, row = models[title], tasks[task]
        axes, bottom = grid[row][column], grid[-1][column]
        for score, low, high in same.loc[
            same["capacity_on"] == _NO_LIMIT, ["score", "score_low", "score_high"]
        ].itertuples(index=False):
            d.rule(axes, score, (0, (1, 2)), 1.0, "no limit ± 1.96 SE")
            axes.axhspan(low, high, color=d.GREY, alpha=0.25, linewidth=0)
        for index, mode in enumerate(_MODES.values()):
            of_mode, look = same[same["capacity_on"] == mode], d.line_look(index, **_POINTS)
            d.line(axes, of_mode, "gamma", "score", f"capacity on {mode} ± 1.96 SE", **look)
        shift = 0.04 * (row - (len(tasks) - 1) / 2)
        with_share = same.dropna(subset="steps_percent")
        # An end that is infinite is beyond the panel.
        with_share = with_share.assign(gamma=with_share["gamma"] + shift).replace(
            [-np.inf, np.inf], [-1e4, 1e4]
        )
        look = d.line_look(len(_MODES) + row, **_POINTS) | {"linestyle": ""}
        d.line(bottom, with_share, "gamma", "steps_percent", task, **look)
        if not column:
            axes.set_ylabel(f"{task}\nscore (%)")
        if not row:
            axes.set_title(title)
    for bottom in grid[-1]:
        d.rule(bottom, 100)
        d.rule(bottom, 0)
        d.gamma_axis(bottom, rows["gamma"].dropna(), space=0.1)  # for the points beside their γ
        bottom.set_ylim(-30, 150)
    grid[-1][0].set_ylabel("share of decode\nsteps (%)")
    d.legend(canvas, 4)
    return canvas
