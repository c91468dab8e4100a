"""Dropping against padding: which capacity factor is best for a given penalty on drops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from capmoe_eval.experiment.names import gamma_number
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.pooling import Grid, by_key, pooled_grid
from capmoe_eval.report.figures.spec import Measured, Numbers
from capmoe_eval.report.figures.style import COLOURS, DASHES, MARKERS, PAGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PENALTIES: Final = (1.0, 5.0, 20.0)
"""The textbook's λ: how many empty slots a dropped assignment is worth."""
_SWEEP: Final = tuple(10 ** (step / 20) for step in range(-20, 41))


def best_gamma(grid: Grid, penalty: float) -> float | None:
    """Return the γ that minimises ``penalty · drop rate + padding waste``.

    The smallest of equal ones; a γ without slots (0) has no padding waste and is no candidate.
    None where no γ of the grid has slots.

    Args:
        grid: Drop rate and padding waste by γ.
        penalty: λ, the cost of a dropped share in units of an empty share.
    """
    costs = [
        (penalty * drop + waste, gamma)
        for gamma, drop, waste in zip(grid.gamma, grid.drop_rate, grid.pad_waste, strict=True)
        if waste is not None
    ]
    return min(costs)[1] if costs else None


def measure_waste(evidence: FigureRecords) -> Measured:
    """Pool each model's grid over layers and tasks, and find the best γ by penalty."""
    models: list[Numbers] = []
    for model, records in by_key(evidence.of("routing"), lambda record: record.model).items():
        grid = pooled_grid(layer for record in records for layer in record.layers)
        models.append(
            {
                "model": evidence.models[model],
                "gamma": list(grid.gamma),
                "drop_rate": list(grid.drop_rate),
                "pad_waste": list(grid.pad_waste),
                "best": [{"penalty": p, "gamma": best_gamma(grid, p)} for p in PENALTIES],
                "sweep": [{"penalty": p, "gamma": best_gamma(grid, p)} for p in _SWEEP],
            }
        )
    ends = [
        model for model in models if any(b["gamma"] == model["gamma"][-1] for b in model["best"])
    ]
    notes = [
        f"{model['model']}: the best γ is the largest of the grid, "
        + f"{gamma_number(model['gamma'][-1])}, for λ = "
        + ", ".join(f"{b['penalty']:g}" for b in model["best"] if b["gamma"] == model["gamma"][-1])
        + "; a larger one may be better."
        for model in ends
    ]
    return Measured({"models": models}, tuple(notes))


def draw_waste(numbers: Numbers) -> Figure:
    """Draw padding against drops with the best γ marked, and the best γ by penalty."""
    figure = new_figure(PAGE, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for index, model in enumerate(numbers["models"]):
        colour, dash, marker = COLOURS[index % 8], DASHES[index % 8], MARKERS[index % 8]
        rows = [
            (gamma, 100 * drop, 100 * waste)
            for gamma, drop, waste in zip(
                model["gamma"], model["drop_rate"], model["pad_waste"], strict=True
            )
            if waste is not None
        ]
        left.plot(
            [waste for _, _, waste in rows],
            [drop for _, drop, _ in rows],
            color=colour,
            linestyle=dash,
            marker=marker,
            markersize=2.2,
            linewidth=0.8,
            label=model["model"],
        )
        _mark_best(left, model["best"], rows, colour)
        sweep = [point for point in model["sweep"] if point["gamma"] is not None]
        right.step(
            [point["penalty"] for point in sweep],
            # Lines of equal height would hide each other.
            [point["gamma"] + 0.02 * index for point in sweep],
            where="mid",
            color=colour,
            linestyle=dash,
        )
    left.set_xlabel("padding waste: empty slots (%)")
    left.set_ylabel("drop rate (%)")
    left.grid()
    left.set_ylim(bottom=-2)
    right.set_xscale("log")
    right.set_xticks([0.1, 1, 5, 20, 100], ["0.1", "1", "5", "20", "100"])
    right.minorticks_off()
    right.set_xlabel("penalty λ of a drop")
    right.set_ylabel("best γ")
    right.grid()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    left.set_title("γ from 0.25 (top left) in steps of 0.25; rings: best γ for λ = 1, 5, 20")
    right.set_title("γ that minimises λ · drop rate + waste")
    return figure


def _mark_best(
    axes: object, best: Sequence[Numbers], rows: Sequence[tuple[float, float, float]], colour: str
) -> None:
    """Ring the best points and write their λ beside them."""
    places: dict[float, list[str]] = {}
    for choice in best:
        if choice["gamma"] is not None:
            places.setdefault(choice["gamma"], []).append(f"{choice['penalty']:g}")
    for gamma, drop, waste in rows:
        if gamma in places:
            axes.plot(  # type: ignore[attr-defined]
                waste, drop, marker="o", markersize=7, markerfacecolor="none", color=colour
            )
