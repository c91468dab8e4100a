"""Panels of curves, bars and maps: what a figure shows, as data, and how it is drawn.

The pictures are for grey print and colour-blind readers: no colour stands alone, markers, dashes or
hatches go with it. Every figure is a :class:`Picture`; its JSON has all fields but the looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from capmoe_eval.experiment.names import gamma_text

COLUMN: Final = 3.3
"""Width of one column, inches."""
PAGE: Final = 6.9
"""Width of both columns, inches."""

# Okabe and Ito's colours, without yellow, which a white page swallows.
BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
ORANGE, SKY, PURPLE, GREY = "#E69F00", "#56B4E9", "#CC79A7", "#8c8c8c"
COLOURS: Final = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-", "--")

Look = dict[str, Any]
"""Options of matplotlib: colours, markers, widths."""
Numbers = Sequence[float | None]
"""Numbers of a mark; None is not drawn."""


@dataclass(frozen=True)
class Curve:
    """Points, joined where the look has a line."""

    name: str  # in the legend; empty for none
    x: Numbers
    y: Numbers
    low: Numbers | None = None  # end of each point's interval, drawn as whiskers
    high: Numbers | None = None
    look: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Bars:
    """Bars from their base to ``y``."""

    name: str
    x: Numbers
    y: Numbers
    width: float
    base: Numbers | float = 0.0
    low: Numbers | None = None
    high: Numbers | None = None
    look: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Level:
    """A line through the whole panel."""

    name: str
    at: float
    is_upright: bool = False
    look: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Strokes:
    """Short lines from ``low`` to ``high``, at ``x`` if they are upright and else at ``y``."""

    name: str
    low: Numbers
    high: Numbers
    x: Numbers | None = None
    y: Numbers | None = None
    look: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Band:
    """The area between two curves, or without ``x`` between two levels."""

    name: str
    low: Numbers
    high: Numbers
    x: Numbers | None = None
    look: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Words:
    """A text at a point of the data, or of the panel whose corners are (0, 0) and (1, 1)."""

    text: str
    at: tuple[float, float]
    of_panel: bool = False
    look: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Map:
    """Loads as shades, one row of experts below the other."""

    rows: Sequence[Sequence[float]]
    scale: str  # what the shades are
    look: Look = field(default_factory=dict)  # of the scale beside it


@dataclass(frozen=True)
class Scale:
    """A scale of numbered curves, from the first (light) to the last (dark)."""

    name: str
    look: Look  # ``shades``: their colours


Mark = Curve | Bars | Level | Strokes | Band | Words | Map | Scale


@dataclass(frozen=True)
class Axis:
    """One axis of a panel."""

    label: str = ""
    ticks: Sequence[float] | None = None  # None: matplotlib's own
    names: Sequence[str] | None = None  # of the ticks
    limits: tuple[float | None, float | None] | None = None
    is_log: bool = False
    is_bare: bool = False  # names without strokes
    margin: float | None = None  # space beyond the marks, as a share of their extent
    whole: int | None = None  # ticks at so many whole numbers, at most


@dataclass(frozen=True)
class Panel:
    """Marks in one frame."""

    title: str
    marks: Sequence[Mark]
    x: Axis = Axis()
    y: Axis = Axis()
    right: Axis | None = None  # a second axis of y
    look: Look = field(default_factory=dict)  # ``grid``, ``title``, ``legend``, ``labels``


@dataclass(frozen=True)
class Picture:
    """A figure: rows of panels."""

    rows: Sequence[Sequence[Panel]]
    notes: Sequence[str] = ()  # what a reader must know, a sentence each
    title: str = ""  # over all panels
    width: float = PAGE  # inches
    height: float = 2.5
    look: Look = field(default_factory=dict)  # ``legend``: its columns; ``layout``: of subplots


def to_json(value: Any) -> Any:
    """Return a picture or a part of it, JSON-ready, without looks, notes and empty fields."""
    if not is_dataclass(value):
        if isinstance(value, (list, tuple, range, np.ndarray)):
            return [to_json(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value
    kind = {"kind": type(value).__name__.lower()} if isinstance(value, Mark) else {}
    content = {
        part.name: getattr(value, part.name)
        for part in fields(value)
        if part.name not in ("look", "notes", "width", "height")
    }
    return kind | {
        name: to_json(item)
        for name, item in content.items()
        if item is not None and not (isinstance(item, str) and not item) and item != Axis()
    }


def line_look(index: int, count: int = len(COLOURS), /, **other: Any) -> Look:
    """Return the colour, dash and marker of one line of several; they repeat after ``count``."""
    place = index % count
    look = {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
    return look | other


def rule(
    at: float, dash: Any = "-", width: float = 0.5, name: str = "", *, is_upright: bool = False
) -> Level:
    """Return a black line through the whole panel."""
    return Level(name, at, is_upright, {"color": BLACK, "linewidth": width, "linestyle": dash})


def bar_look(colour: str, hatch: str = "", **other: Any) -> Look:
    """Return the colour, hatch and black edge of bars."""
    return {"color": colour, "hatch": hatch, "edgecolor": "black", **other}


def percent(shares: Numbers) -> list[float]:
    """Return shares in percent; None becomes NaN, which is not drawn."""
    return [math.nan if share is None else 100 * share for share in shares]


def whiskers(middle: Any, low: Any, high: Any) -> Any:
    """Return how far whiskers reach below and above the middle of every row [2, rows]."""
    return np.abs(np.array([low, high], dtype=float) - np.array(middle, dtype=float))


def gamma_axis(
    gammas: Sequence[float], label: str = "capacity factor γ", space: float = 0.05
) -> Axis:
    """Return an axis of capacity factors, with ticks at whole and half numbers."""
    low, high = min(gammas), max(gammas)
    step = 1.0 if high - low > 2 else 0.5
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(label, ticks, list(map(gamma_text, ticks)), (low - space, high + space))


def in_rows(panels: Sequence[Panel], height: float, y: str, **look: Any) -> Picture:
    """Return a picture of panels in rows of four, each ``height`` inches high."""
    rows = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    first, *others = panels
    ordered = [replace(first, y=replace(first.y, label=y)), *others]
    return Picture(
        [ordered[start : start + columns] for start in range(0, len(panels), columns)],
        width=COLUMN if columns == 1 else PAGE,
        height=height * rows,
        look=look,
    )


def draw(picture: Picture) -> Figure:
    """Draw a picture at its printed size, laid out without overlaps."""
    figure = Figure(figsize=(picture.width, picture.height), layout="constrained")
    look = picture.look
    shape = len(picture.rows), max(map(len, picture.rows))
    grid = figure.subplots(*shape, squeeze=False, **look.get("layout", {}))
    for row, line in zip(picture.rows, grid, strict=True):
        for axes in line[len(row) :]:
            axes.remove()
        for panel, axes in zip(row, line, strict=False):
            _draw_panel(axes, panel)
    if picture.title:
        figure.suptitle(picture.title, **look.get("title", {}))
    if "legend" in look:
        handles: Look = {}
        for axes in figure.axes:
            artists, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, artists, strict=True))
        place = look.get("legend_at", "outside lower center")
        figure.legend(handles.values(), handles, loc=place, ncols=look["legend"])
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for name, axis in (("x", panel.x), ("y", panel.y)):
        if axis.is_log:
            getattr(axes, f"set_{name}scale")("log")
    for mark in panel.marks:
        _draw_mark(axes, mark)
    look = panel.look
    for name, axis in (("x", panel.x), ("y", panel.y)):
        _draw_axis(axes, name, axis)
    if (grid := look.get("grid", "both")) is not None:
        axes.grid(axis=grid)
    if look.get("labels"):
        axes.tick_params(axis="y", labelleft=True)
    if panel.right is not None:
        right = axes.secondary_yaxis("right")
        _draw_axis(right, "y", panel.right)
        right.spines[:].set_visible(False)
    if panel.title:
        axes.set_title(panel.title, **look.get("title", {}))
    if "legend" in look:
        axes.legend(**look["legend"])


def _draw_axis(axes: Any, name: str, axis: Axis) -> None:
    if axis.ticks is not None:
        getattr(axes, f"set_{name}ticks")(axis.ticks, axis.names)
        if axis.is_bare:
            axes.tick_params(axis=name, length=0)
        if axis.is_log:
            axes.minorticks_off()
    elif axis.is_log:
        getattr(axes, f"{name}axis").set_major_formatter("{x:g}")
    elif axis.whole is not None:
        getattr(axes, f"{name}axis").set_major_locator(MaxNLocator(axis.whole, integer=True))
    if axis.label:
        getattr(axes, f"set_{name}label")(axis.label)
    if axis.margin is not None:
        axes.margins(**{name: axis.margin})
    if axis.limits is not None:
        getattr(axes, f"set_{name}lim")(*axis.limits)


def _draw_mark(axes: Any, mark: Mark) -> None:
    look = mark.look
    match mark:
        case Curve() | Bars():
            ends = None if mark.low is None else whiskers(mark.y, mark.low, mark.high)
            y = np.array(mark.y, dtype=float)
            if isinstance(mark, Bars):
                heights, style = y - np.array(mark.base), {"bottom": mark.base, "yerr": ends} | look
                axes.bar(mark.x, heights, mark.width, **style, label=mark.name)
            elif "capsize" in look:
                axes.errorbar(mark.x, y, ends, **look, label=mark.name)
            else:
                axes.plot(mark.x, y, **look, label=mark.name)
        case Level():
            line = axes.axvline if mark.is_upright else axes.axhline
            line(mark.at, **look, label=mark.name)
        case Strokes():
            stroke, place = (axes.vlines, mark.x) if mark.y is None else (axes.hlines, mark.y)
            stroke(place, mark.low, mark.high, **look, label=mark.name)
        case Band(x=None):
            axes.axhspan(mark.low[0], mark.high[0], **look, label=mark.name)
        case Band():
            axes.fill_between(mark.x, mark.low, mark.high, **look, label=mark.name)
        case Words():
            frame = "axes fraction" if mark.of_panel else "data"
            axes.annotate(mark.text, mark.at, xycoords=frame, **look)
        case Map():
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
            # The grey of these shades is monotone: dark is much.
            shades = axes.imshow(
                mark.rows, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest"
            )
            axes.figure.colorbar(shades, ax=axes, label=mark.scale, pad=0.01, **look)
        case Scale():
            shades = look["shades"]
            count = len(shades)
            norm = BoundaryNorm([number + 0.5 for number in range(count + 1)], count)
            colours = ScalarMappable(norm, ListedColormap(shades))
            bar = axes.figure.colorbar(colours, ax=axes, label=mark.name, pad=0.02)
            bar.set_ticks(range(1, count + 1, max(1, -(-count // 8))))
            bar.ax.tick_params(length=0, which="both")
