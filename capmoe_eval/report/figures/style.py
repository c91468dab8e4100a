"""Widths, colours, axes and legends, for grey print and colour-blind readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from capmoe_eval.experiment.names import gamma_text

COLUMN: Final = 3.3
"""Width of one column, inches."""
PAGE: Final = 6.9
"""Width of both columns, inches."""

# Okabe and Ito's colours, without yellow, which a white page swallows. Their greys are not all
# different, so that no colour ever stands alone: markers, dashes or hatches go with it.
BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
ORANGE, SKY, PURPLE, GREY = "#E69F00", "#56B4E9", "#CC79A7", "#8c8c8c"
COLOURS: Final = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-", "--")


def subplots(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure of a printed size in inches, laid out without overlaps, and its panels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def model_panels(
    models: Sequence[Any], height: float, *, same_scale: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each model, in rows of four, each ``height`` inches high."""
    rows = math.ceil(len(models) / 4)
    columns = math.ceil(len(models) / rows)
    width = COLUMN if columns == 1 else PAGE
    figure, axes = subplots(width, height * rows, rows, columns, squeeze=False, sharey=same_scale)
    for unused in axes.flat[len(models) :]:
        unused.remove()
    return figure, list(axes.flat[: len(models)])


def legend_below(figure: Figure, *axes: Axes, columns: int) -> None:
    """Put one legend of some panels under the whole figure, each label once."""
    found: dict[str, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found, loc="outside lower center", ncols=columns)


def load_map(axes: Axes, rows: Sequence[Sequence[float]]) -> AxesImage:
    """Draw loads as a map of shades without a frame, one row of experts below the other."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    # The grey of these shades is monotone: dark is much.
    return axes.imshow(rows, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")


def line_look(index: int, count: int = len(COLOURS)) -> dict[str, Any]:
    """Return the colour, dash and marker of one line of several; they repeat after ``count``."""
    place = index % count
    return {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place]}


def bar_look(colour: str, hatch: str = "") -> dict[str, Any]:
    """Return the colour, hatch and black edge of bars."""
    return {"color": colour, "hatch": hatch, "edgecolor": "black"}


def column(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return one number of every row."""
    return [row[key] for row in rows]


def percent(shares: Sequence[float | None]) -> Any:
    """Return shares in percent, as an array; None becomes NaN, which is not drawn."""
    return 100 * np.array(shares, dtype=float)


def whiskers(middle: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Any:
    """Return how far whiskers reach below and above the middle of every row [2, rows]."""
    return np.abs(np.array([low, high]) - middle)


def gamma_axis(axes: Axes, gammas: Sequence[float]) -> None:
    """Make the horizontal axis one of capacity factors, with ticks at whole and half numbers."""
    low, high = min(gammas), max(gammas)
    step = 1.0 if high - low > 2 else 0.5
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.set_xticks(ticks, list(map(gamma_text, ticks)))
    axes.set(xlim=(low - 0.05, high + 0.05), xlabel="capacity factor γ")
