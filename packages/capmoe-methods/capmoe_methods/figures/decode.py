"""Generation by γ: the capacity on the prompt alone, and on every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from capmoe_eval.experiment.names import gamma_text, is_stock
from capmoe_eval.lazy import pd
from capmoe_eval.paper.pairing import answered_by_cells, pair
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.scores import with_interval
from capmoe_eval.report.figures.sources import Sources

from capmoe_methods.comparison import Interval, interval, share_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODES: Final = {"unconstrained": "the prompt alone", "constrained": "every step"}
_LOOKS: Final[dict[str, d.Look]] = {
    "the prompt alone": {"marker": "o", "mfc": None},
    "every step": {"marker": "s", "linestyle": "--", "mfc": "white"},
}
_NO_LIMIT: Final = "no limit"
_SHARES: Final = tuple(f"steps_percent{end}" for end in ("", "_low", "_high"))


def by_mode(sources: Sources) -> pd.DataFrame:
    """Return each task's scores by γ in both modes, and what decode steps do of the damage.

    ``steps_percent`` is a column of the rows of every step.
    """
    limited = sources.cells("generation")
    cells = pd.concat([limited, sources.cells("generation_unlimited")])
    cells["decode"] = cells["decode"].astype(object).fillna("unconstrained")
    order = [cells["gamma"], cells["asked"].map([*sources.tasks.values()].index)]
    order += [cells["title"].map([*sources.models.values()].index)]
    cells = cells.iloc[np.lexsort(order)]
    rows = pd.DataFrame(
        {
            "model": cells["title"],
            "task": cells["asked"],
            "capacity_on": cells["decode"]
            .map(_MODES)
            .mask(cells["method"].map(is_stock), _NO_LIMIT),
            "gamma": cells["gamma"],
            "score": 100 * cells["value"],
            "stderr": 100 * cells["stderr"],
        }
    )
    rows[list(_SHARES)] = np.nan
    for (title, task), same in d.each(cells, ["title", "asked"]):
        stock = same[same["method"].map(is_stock)]
        for gamma, of_gamma in d.each(same, "gamma"):
            by_decode = {mode: of_gamma[of_gamma["decode"] == mode] for mode in _MODES}
            if stock.empty or any(mode.empty for mode in by_decode.values()):
                continue
            share = _share(sources, stock, *by_decode.values())
            if isinstance(share, str):
                text = f"{title}, {task}: no share at γ={gamma_text(gamma)}: {share}."
                sources.notes.append(text)
            else:
                number = by_decode["constrained"].index[0]
                rows.loc[number, list(_SHARES)] = [100 * value for value in share]
    sources.notes.extend(_steps(limited))
    return with_interval(rows.reset_index(drop=True), "score")


def _share(sources: Sources, *cells: pd.DataFrame) -> Interval | str:
    """Return the decode steps' share of the damage, or why it is not known.

    The share is only known where the damage of every step is distinguishable from zero: where its
    95 % interval lies above 0. The cells are those of no limit, of the prompt alone, of every step.
    """
    stock, prompt, every = (
        next(iter(answered_by_cells(sources.results, of).values())) for of in cells
    )
    whole, of_steps, task = pair(stock, every), pair(prompt, every), cells[0]["task"].iloc[0]
    if isinstance(whole, str):
        return whole
    if isinstance(of_steps, str):
        return of_steps
    _, low, _ = interval({task: whole.units})
    if low > 0:
        return share_of(of_steps.units, whole.units, task)
    return "the damage is not distinguishable from zero"


def _steps(cells: pd.DataFrame) -> list[str]:
    """Say how many sequences the decode steps had, and what γ was for them after rounding."""
    live, rounded = "load.decode.live", "load.decode.effective_gamma"
    if not {live, rounded} <= set(cells):
        return []
    steps = cells[cells["gamma"] > 0].dropna(subset=[live, rounded])
    notes = []
    for title, same in steps[steps[rounded].astype(float) > 0].groupby("title", sort=False):
        ends = same.groupby("gamma")[rounded].agg(["min", "max"]).map("{:.2f}".format)
        texts = [
            f"{gamma_text(gamma)} is {' to '.join(dict.fromkeys(row))}"
            for gamma, *row in ends.itertuples()
        ]
        notes.append(
            f"{title}: a decode step has {same[live].min():.1f} to {same[live].max():.1f} live "
            f"sequences, by cell, for which γ after rounding: {', '.join(texts)}."
        )
    return notes


@figure(
    "not in the paper", "Generation with a capacity on the prompt alone, and on every step",
    by_mode, parts=["generation_unlimited", "generation"], tasks=["gsm8k", "nq_open", "mts_dialog"],
)  # fmt: skip
def decode(rows: pd.DataFrame) -> Figure:
    """Score of each task under Token Drop by γ, with a capacity for the prompt alone
    (decode=unconstrained; filled) and for every step (constrained; hollow). Dotted: without a
    limit. Up to 64 sequences are generated together as one group; those that have finished leave
    it. Last: what the decode steps add to the damage, as a share of the damage of every step,
    paired by document. It is there where the 95 % interval of that damage lies above zero.
    Whiskers: 95 % intervals over documents, which may go beyond the panel. Points of one γ are set
    apart.
    """
    models, tasks = d.places(rows["model"]), d.places(rows["task"])
    lines = -(-(len(tasks) + 1) // 2)
    canvas, grid = d.canvas(1.9 * lines + 0.6, lines, 2)
    *panels, bottom = grid.flat[: len(tasks) + 1]
    small = {"markersize": 3, "elinewidth": 0.7, "capsize": 1.5}
    for (title, task), same in d.each(rows, ["model", "task"]):
        colour, axes = d.COLOURS[models[title]], panels[tasks[task]]
        for score in same.loc[same["capacity_on"] == _NO_LIMIT, "score"]:
            axes.axhline(score, color=colour, linestyle=":", linewidth=1.0)
        for mode, look in _LOOKS.items():
            of_mode, name = same[same["capacity_on"] == mode], title if look["mfc"] is None else ""
            d.line(axes, of_mode, "gamma", "score", name, color=colour, **look | small)
        shift = 0.03 * (len(tasks) * models[title] + tasks[task] - len(tasks) * len(models) / 2)
        shares = same.dropna(subset="steps_percent")
        # An end that is infinite is beyond the panel.
        shares = shares.assign(gamma=shares["gamma"] + shift).replace(
            [-np.inf, np.inf], [-1e4, 1e4]
        )
        look = {"color": colour, "marker": d.MARKERS[2 + tasks[task]], "linestyle": ""}
        d.line(bottom, shares, "gamma", "steps_percent", **look | small)
        axes.set(title=task, ylabel="score (%)")
    black = {f"capacity on {mode}": look for mode, look in _LOOKS.items()}
    for task, place in tasks.items():
        black[f"decode steps, {task}"] = {"marker": d.MARKERS[2 + place], "linestyle": ""}
    for name, look in black.items():
        bottom.plot([], [], color=d.BLACK, markersize=3, **look, label=name)
    for axes in (*panels, bottom):
        d.gamma_axis(axes, rows["gamma"].dropna(), space=0.15)  # for the points beside their γ
    for share in (0, 100):
        d.rule(bottom, share)
    bottom.set(title="share of decode steps", ylabel="of all damage (%)", ylim=(-30, 150))
    for axes in grid.flat[len(tasks) + 1 :]:
        axes.remove()
    d.legend(canvas)
    return canvas
