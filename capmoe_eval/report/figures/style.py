"""Sizes, fonts, colours and legends, for grey print and colour-blind readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.names import gamma_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

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
HATCHES: Final = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
SHADES: Final = "Blues"
"""A colour map whose grey is monotone: dark is much."""

_RC: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.borderaxespad": 0.3,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "patch.linewidth": 0.4,
    "hatch.linewidth": 0.4,
    "grid.linewidth": 0.3,
    "grid.color": "#d0d0d0",
    "axes.axisbelow": True,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.dpi": 300,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # text stays text, in the font that was measured
    "svg.fonttype": "path",  # a browser need not have the font
    "svg.hashsalt": "capmoe_eval",  # ids of elements: the same in every run
}


@contextmanager
def house_style() -> Iterator[None]:
    """Set matplotlib's parameters, drawing and saving included, and put them back."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a printed size in inches, laid out without overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(count: int, height: float, *, same_scale: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels in rows of four over both columns; one takes one column.

    Args:
        count: Number of panels.
        height: Of one row, inches.
        same_scale: Whether all have one vertical axis.
    """
    rows = math.ceil(count / 4)
    columns = math.ceil(count / rows)
    width = COLUMN if columns == 1 else PAGE
    figure = new_figure(width, height * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=same_scale)
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.remove()
    return figure, flat[:count]


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
    return axes.imshow(rows, aspect="auto", cmap=SHADES, vmin=0, interpolation="nearest")


def corner_note(axes: Axes, text: str, *, top: float = 0.97) -> None:
    """Write something small into the upper right corner of a panel."""
    axes.annotate(text, (0.98, top), xycoords="axes fraction", ha="right", va="top", fontsize=6.5)


def line_look(index: int, count: int = len(COLOURS)) -> dict[str, Any]:
    """Return the colour, dash and marker of one line of several; they repeat after ``count``."""
    place = index % count
    return {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place]}


def bar_look(colour: str, hatch: str) -> dict[str, Any]:
    """Return the colour, hatch and black edge of bars."""
    return {"color": colour, "hatch": hatch, "edgecolor": "black"}


def column(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return one number of every row."""
    return [row[key] for row in rows]


def percent(shares: Iterable[float | None]) -> list[Any]:
    """Return shares in percent; None, which is not drawn, stays None."""
    return [None if share is None else 100 * share for share in shares]


def whiskers(
    middle: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return how far whiskers reach below and above the middle of every row."""
    below = [at - end for at, end in zip(middle, low, strict=True)]
    return below, [end - at for at, end in zip(middle, high, strict=True)]


def gamma_axis(axes: Axes, gammas: Sequence[float]) -> None:
    """Make the horizontal axis one of capacity factors, with ticks at whole and half numbers."""
    low, high = min(gammas), max(gammas)
    step = 1.0 if high - low > 2 else 0.5
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.set_xticks(ticks, list(map(gamma_number, ticks)))
    axes.set(xlim=(low - 0.05, high + 0.05), xlabel="capacity factor γ")
