"""Drop rate against padding waste by γ, and the best γ for a penalty of drops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.catalogue import figure
from capmoe_eval.report.figures.routing import GRID, pooled_grid
from capmoe_eval.report.figures.sources import Sources

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PENALTIES: Final = (1.0, 5.0, 20.0)
"""The textbook's λ: how many empty slots a dropped assignment is worth."""
_SWEEP: Final = tuple(10 ** (step / 20) for step in range(-20, 41))


def best_gamma(grid: pd.DataFrame, penalty: float) -> float | None:
    """Return the γ that minimises ``penalty · drop rate + padding waste``.

    The penalty is λ, the cost of a dropped share in units of an empty share. The smallest of equal
    γ is taken; one without slots (0) has no padding waste and is no candidate. None if all are so.
    """
    costs = penalty * grid["drop_rate"] + grid["pad_waste"]
    return float(grid["gamma"].iloc[costs.argmin()]) if costs.notna().any() else None


def waste_by_gamma(sources: Sources) -> pd.DataFrame:
    """Return drops and padding by γ, and the best γ by penalty: rows of one kind, then the other.

    ``best_for`` has those of the penalties 1, 5 and 20 that a γ is best for.
    """
    parts = []
    for title, layers in d.each(sources.layers("routing"), "title"):
        grid = pooled_grid(layers)
        best = {f"{penalty:g}": best_gamma(grid, penalty) for penalty in PENALTIES}
        of_gamma = pd.DataFrame(
            {
                "gamma": grid["gamma"],
                "dropped_percent": 100 * grid["drop_rate"],
                "padding_percent": 100 * grid["pad_waste"],
                "best_for": [
                    " ".join(name for name, at in best.items() if at == gamma)
                    for gamma in grid["gamma"]
                ],
            }
        )
        sweep = {"penalty": _SWEEP, "best_gamma": [best_gamma(grid, p) for p in _SWEEP]}
        parts += [of_gamma.assign(model=title), pd.DataFrame(sweep).assign(model=title)]
        if at_end := of_gamma["best_for"].iloc[-1]:
            last = gamma_text(grid["gamma"].iloc[-1])
            sources.notes.append(
                f"{title}: the best γ is the largest of the grid, {last}, for "
                f"λ = {at_end.replace(' ', ', ')}; a larger one may be better."
            )
    return pd.concat(parts, ignore_index=True)


@figure(
    "not in the paper", "Drop rate against padding waste, and the best γ for a penalty",
    waste_by_gamma, words=GRID, parts=["routing"],
)  # fmt: skip
def waste(rows: pd.DataFrame) -> Figure:
    """{grid} Padding waste: empty slots over slots; γ grows from 0.25 (top left) in steps of 0.25.
    The best γ minimises λ · drop rate + padding waste over the grid 0.25, 0.5, … 4; rings: for λ =
    1, 5, 20. Below, lines are set apart by 0.02.
    """
    canvas, ((upper,), (lower,)) = d.canvas(4.2, 2, 1, height_ratios=[3, 2])
    looks = d.looks(rows["model"])
    grid, sweep = rows[rows["penalty"].isna()], rows[rows["penalty"].notna()]
    across, up = "padding_percent", "dropped_percent"
    d.lines(upper, grid, across, up, "model", looks, markersize=2.2, linewidth=0.8)
    for index, (title, look) in enumerate(looks.items()):
        ring = {"markersize": 7, "markerfacecolor": "none", "color": look["color"], "linestyle": ""}
        best = grid[(grid["model"] == title) & (grid["best_for"] != "")]
        d.line(upper, best, across, up, marker="o", **ring)
        same = sweep[sweep["model"] == title]
        apart = same.assign(best_gamma=same["best_gamma"] + 0.02 * index)  # equals hide
        d.line(
            lower, apart, "penalty", "best_gamma", **look | {"marker": ""}, drawstyle="steps-mid"
        )
    upper.set(xlabel="padding waste: empty slots (%)", ylabel="drop rate (%)", ylim=(-2, None))
    lower.set(xlabel="penalty λ of a drop", ylabel="best γ", xscale="log")
    lower.set_xticks([0.1, 1, 5, 20, 100], ["0.1", "1", "5", "20", "100"])
    lower.minorticks_off()
    d.legend(canvas)
    return canvas
