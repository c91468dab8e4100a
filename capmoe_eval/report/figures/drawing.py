"""Pictures of one width and style; what is drawn are columns of a data frame.

The pictures are for grey print and colour-blind readers: no colour stands alone, markers, dashes or
hatches go with it. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.lazy import pd

if TYPE_CHECKING:
    import matplotlib.figure

STYLE: Final = Path(__file__).with_name("house.mplstyle")
"""Sizes and fonts of every picture."""
WIDTH: Final = 4.375
"""Inches of every picture: 420 px on a page, on which its words can be read."""

# Okabe and Ito's colours, without yellow, which a white page swallows.
BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
ORANGE, SKY, PURPLE, GREY = "#E69F00", "#56B4E9", "#CC79A7", "#8c8c8c"
COLOURS: Final = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-", "--")

Figure: TypeAlias = "matplotlib.figure.Figure"
Look: TypeAlias = dict[str, Any]
"""Options of matplotlib: colours, markers, widths."""
THIN: Final[Look] = {"elinewidth": 0.5, "capsize": 1}
"""Whiskers of many points."""
STAR: Final[Look] = {"color": BLACK, "marker": "*", "linestyle": "", "markersize": 6}
BARS: Final[Sequence[Look]] = [
    {"color": colour, "hatch": hatch, "edgecolor": "black"}
    for colour, hatch in (
        *((BLUE, ""), (SKY, "////"), (ORANGE, "...."), (VERMILLION, "xxxx")),
        *((GREEN, "\\\\\\\\"), (PURPLE, "++++"), (GREY, "")),
    )
]
"""Colours, hatches and edges of bars, in the order in which they are taken."""


def canvas(height: float, rows: int = 1, columns: int = 1, **layout: Any) -> tuple[Figure, Any]:
    """Return a figure of a height in inches, and its axes [rows, columns]."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **layout)
    for each in axes.flat:
        each.grid()
    return figure, axes


def panels(
    rows: pd.DataFrame, by: str | list[str], height: float, columns: int = 2, **layout: Any
) -> tuple[Figure, list[tuple[Any, pd.DataFrame, Any]]]:
    """Return a figure with a panel for each value of a column, or of several, in the rows' order.

    Each panel is the value, its rows and its axes; ``columns`` stand beside each other.
    """
    groups = list(each(rows, by))
    columns = min(columns, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure, grid = canvas(height * lines, lines, columns, **layout)
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    return figure, [(value, same, a) for (value, same), a in zip(groups, grid.flat, strict=False)]


def line_look(index: int, count: int = len(COLOURS), /, **other: Any) -> Look:
    """Return the colour, dash and marker of one line of several; they repeat after ``count``."""
    place = index % count
    look = {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
    return look | other


def looks(names: Iterable[str], **other: Any) -> dict[str, Look]:
    """Return how the line of each name looks, by the order of the names."""
    return {name: line_look(place, **other) for name, place in places(names).items()}


def line(axes: Any, rows: pd.DataFrame, x: str, y: str, name: str = "", **look: Any) -> None:
    """Draw one line; with whiskers from the columns ``<y>_low`` to ``<y>_high``, if there are."""
    across, up = (rows[column].to_numpy(float) for column in (x, y))
    if (ends := whiskers(rows, y)) is not None:
        style = {"elinewidth": 0.7, "capsize": 1.5} | look
        axes.errorbar(across, up, ends, **style, label=name)
    else:
        plain = {key: look[key] for key in look.keys() - {"elinewidth", "capsize"}}
        axes.plot(across, up, **plain, label=name)


def lines(
    axes: Any, rows: pd.DataFrame, x: str, y: str, by: str, looks: Mapping[str, Look], **other: Any
) -> None:
    """Draw a line for each value of a column, each with its look."""
    for name, same in each(rows, by):
        line(axes, same, x, y, name, **looks[name] | other)


def bars(axes: Any, rows: pd.DataFrame, x: str, y: str, by: str, base: float = 0.0) -> pd.DataFrame:
    """Draw bars from a base, grouped by ``x``, in each group one for every value of ``by``.

    Whiskers are as those of :func:`line`. Returns the rows with ``place``, the middle of each bar,
    and ``width``.
    """
    groups, members = places(rows[x]), places(rows[by])
    width = 0.8 / max(1, len(members))
    shift = (rows[by].map(members).astype(float) - (len(members) - 1) / 2) * width
    rows = rows.assign(place=rows[x].map(groups).astype(float) + shift, width=width)
    for (name, same), look in zip(each(rows, by), BARS, strict=False):
        thin = {"yerr": whiskers(same, y), "error_kw": {"elinewidth": 0.9, "capsize": 1.5}}
        heights = same[y] - base
        axes.bar(same["place"], heights, 0.92 * width, base, **look | thin, label=name)
    axes.grid(False, axis="x")
    return rows


def whiskers(rows: pd.DataFrame, y: str) -> Any:
    """Return how far whiskers reach below and above every row [2, rows]; None without any."""
    if f"{y}_low" not in rows or rows[f"{y}_low"].isna().all():
        return None
    ends = rows[[f"{y}_low", f"{y}_high"]].to_numpy(float).T
    return np.abs(ends - rows[y].to_numpy(float))


def rule(
    axes: Any,
    at: float,
    dash: Any = "-",
    width: float = 0.5,
    name: str = "",
    *,
    is_upright: bool = False,
) -> None:
    """Draw a black line through the whole panel."""
    draw = axes.axvline if is_upright else axes.axhline
    draw(at, color=BLACK, linewidth=width, linestyle=dash, label=name)


def load_bars(axes: Any, loads: Any, name: str, **look: Any) -> None:
    """Draw a bar for each expert: its load over the mean load N̄, the fullest expert first."""
    axes.grid(False)
    style = {"color": "#c8c8c8", "width": 0.9} | look
    axes.bar(range(len(loads)), loads, **style, label=name)
    axes.set(xlim=(-0.7, len(loads) - 0.3), xticks=[])
    axes.set(xlabel="experts, busiest first", ylabel="load / mean load N̄")


def loads_map(axes: Any, loads: Any, name: str, aspect: float) -> None:
    """Draw loads [rows, experts] as shades, with their scale; the grey of these is monotone."""
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    shades = axes.imshow(loads, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    axes.figure.colorbar(shades, ax=axes, label=name, pad=0.01, aspect=aspect)


def gamma_axis(
    axes: Any, gammas: Iterable[float], label: str = "capacity factor γ", space: float = 0.05
) -> None:
    """Give an axis of capacity factors ticks at whole and half numbers."""
    numbers = [float(gamma) for gamma in gammas if math.isfinite(gamma)] or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    step = 1.0 if high - low > 2 else 0.5
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.set_xticks(ticks, list(map(gamma_text, ticks)))
    axes.set_xlim(low - space, high + space)
    axes.set_xlabel(label)


def name_places(axes: Any, names: Iterable[str], places: Iterable[float] | None = None) -> None:
    """Name places across, without strokes."""
    labels = list(names)
    axes.set_xticks(list(range(len(labels)) if places is None else places), labels)
    axes.tick_params(axis="x", length=0)


def legend(figure: Figure, columns: int = 2) -> None:
    """Draw one legend of all panels, each name once."""
    handles: Look = {}
    for axes in figure.axes:
        artists, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    place: Any = "outside lower center"
    figure.legend(list(handles.values()), list(handles), loc=place, ncols=columns)


def each(rows: pd.DataFrame, by: str | list[str]) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Yield the rows of each value of a column, or of several, in the order of their first rows."""
    yield from rows.groupby(by, sort=False)


def places(names: Iterable[Any]) -> Mapping[Any, int]:
    """Return the place of each name, from 0, in the order of their first."""
    return {name: place for place, name in enumerate(dict.fromkeys(names))}
