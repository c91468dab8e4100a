"""Pictures of the replication: verdicts as a forest plot, a panel for each claim, and gaps."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from capmoe_eval.paper.replication import GAPS
from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    NOT_SHOWN,
    VerdictFile,
    WrittenClaim,
    WrittenFinding,
    WrittenGrouping,
)
from capmoe_eval.report.figures import drawing

# Told apart by shape, too.
_LOOKS: Final = {
    CONFIRMED: (drawing.BLUE, "o", "●"),
    CONTRADICTED: (drawing.VERMILLION, "X", "✖"),
    NOT_SHOWN: ("#6e6e6e", "s", "■"),
}
_MODEL: Final = "#b0b0b0"
_POINTS: Final = 9.0
_ARROW_POINTS: Final = 8.0
"""Of the words of an arrow, which must fit into the width of a panel."""
_OVER_LINES: Final = 5
"""What is drawn so covers the lines through all rows, in its row alone."""
_WIDTH: Final = 900 / 96
"""Inches at which 9 pt are 9 pt on a page that shows the picture 900 px wide."""
_LINE: Final = 0.168
"""Height of one line of text, inches."""
_LABELS: Final = 2.9
"""Width of the labels of a panel, inches."""
_TICKS: Final = 0.34
"""Height of the ticks of a panel with the distance to the next, inches."""
_FOOT: Final = 0.9
_DWARFS: Final = 3.0
"""Rows that reach this many times as far as the others, and as 1 point, leave their panel."""


class ClaimPanel(NamedTuple):
    """One claim and its contrasts in points."""

    title: str
    rows: list[WrittenFinding]
    labels: list[str]

    @classmethod
    def of(cls, claim: WrittenClaim) -> ClaimPanel:
        """Return the panel of a claim, its title and labels in lines."""
        rows = [f for f in claim.contrasts if f.unit == "points" and f.effect is not None]
        verdict = " ".join([claim.verdict, claim.scope]).rstrip()
        title = textwrap.fill(f"({claim.id}) {verdict}: {claim.statement}", 58)
        return cls(title, rows, [_label(row.label) for row in rows])

    @property
    def inches(self) -> float:
        """Height of its contrasts."""
        return _LINE * sum(label.count("\n") + 1 for label in self.labels)

    @property
    def height(self) -> float:
        """Height with title and ticks, inches."""
        return self.inches + _LINE * (self.title.count("\n") + 1) + _TICKS + 0.16


def _label(label: str) -> str:
    """Return a label in lines; a knob whose value is a word goes without its name."""
    short = re.sub(r"\b[a-z]+=(?=[a-z])", "", label)
    # No line begins with a γ: textwrap leaves no-break spaces alone.
    return textwrap.fill(short.replace(" γ", "\xa0γ"), 40)


def draw(file: VerdictFile) -> Figure:
    """Draw every contrast's effect with its interval, beside its margin and each model's effect."""

    def tall(column: Sequence[ClaimPanel]) -> float:
        return sum(panel.height for panel in column)

    claims = [panel for panel in map(ClaimPanel.of, file.claims) if panel.rows]
    split = min(range(len(claims) + 1), key=lambda n: max(tall(claims[:n]), tall(claims[n:])))
    columns = claims[:split], claims[split:]
    height = _FOOT + max(map(tall, columns))
    with rc_context({"font.size": _POINTS}):
        figure = Figure(figsize=(_WIDTH, height))
        for x, column in zip((0.05, 0.05 + _WIDTH / 2), columns, strict=True):
            top = height
            for panel in column:
                _draw_panel(figure, panel, x, top)
                top -= panel.height
        _legend(figure, file)
    return figure


def _draw_panel(figure: Figure, panel: ClaimPanel, x: float, top: float) -> None:
    """Draw a panel whose upper left corner is at some inches from the lower left of the figure."""
    width, height = figure.get_size_inches()
    title_at = x / width, (top - 0.06) / height
    figure.text(*title_at, panel.title, va="top", weight="bold")
    box = (
        (x + _LABELS) / width,
        (top - panel.height + _TICKS) / height,
        (_WIDTH / 2 - _LABELS - 0.15) / width,
        panel.inches / height,
    )
    _draw_rows(figure.add_axes(box), panel)


def _extent(row: WrittenFinding) -> float:
    return max(abs(end) for end in (row.effect, row.low, row.high) if end is not None)


def _reach(rows: Sequence[WrittenFinding]) -> float:
    """Return how far from 0 a panel shows effects; no more than half of them lie beyond."""
    far = sorted(map(_extent, rows))
    for index in range((len(far) + 1) // 2, len(far)):
        if far[index] > _DWARFS * max(1.0, far[index - 1]):
            return far[index - 1]
    return far[-1]


def _draw_rows(axes: Axes, panel: ClaimPanel) -> None:
    """Draw the contrasts of one claim, from the top; an arrow stands for what is not in reach."""
    reach = _reach(panel.rows)
    ends = [0.0]
    places, below = [], 0.0
    for row, label in zip(panel.rows, panel.labels, strict=True):
        lines = label.count("\n") + 1
        place = below + lines / 2
        places.append(place)
        effect, (colour, marker, _) = row.effect or 0.0, _LOOKS[row.verdict]
        # A bound of 0 is the line through all rows.
        margins = [bound for bound in row.bounds or () if bound]
        ends += margins
        below += lines
        if _extent(row) > reach:
            axes.axhspan(below - lines, below, color="white", linewidth=0, zorder=_OVER_LINES)
            _arrow(axes, row, place)
            ends.append(math.copysign(reach, effect))
            continue
        axes.vlines(margins, below - lines, below, "black", linestyles="--", linewidth=1.2)
        models = list(row.models.values())
        axes.plot(models, [place] * len(models), "|", color=_MODEL, markersize=8)
        ends += [*models, effect]
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2.2)
            ends += [row.low, row.high]
        if row.wide is not None:
            axes.plot(row.wide, [place, place], color=colour, linewidth=0.9)
            ends += row.wide
        axes.plot(effect, place, marker, color=colour, markersize=6.5)
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    axes.set_yticks(places, panel.labels)
    axes.set_ylim(below, 0)
    space = 0.06 * (max(ends) - min(ends)) or 1.0
    axes.set_xlim(min(ends) - space, max(ends) + space)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _arrow(axes: Axes, row: WrittenFinding, place: float) -> None:
    """Write an effect at the edge of its panel, with an arrow out of it."""
    effect = row.effect or 0.0
    colour, _, mark = _LOOKS[row.verdict]
    text = f"{mark} {effect:+.1f}"
    if row.low is not None and row.high is not None:
        text += f" [{row.low:+.1f}, {row.high:+.1f}]"
    right = effect > 0
    axes.annotate(
        f"{text} ▶" if right else f"◀ {text}",
        (1.0 if right else 0.0, place),
        xycoords=("axes fraction", "data"),
        ha="right" if right else "left",
        va="center",
        color=colour,
        fontsize=_ARROW_POINTS,
        zorder=_OVER_LINES + 1,
    )


def _legend(figure: Figure, file: VerdictFile) -> None:
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=6.5, linewidth=2.2, label=word)
        for word, (colour, marker, _) in _LOOKS.items()
    ]
    handles += [
        Line2D([], [], color=_MODEL, marker="|", linestyle="", markersize=8, label="one model"),
        Line2D([], [], color="black", linestyle="--", linewidth=1.2, label="margin"),
        Line2D([], [], color="black", marker="$▶$", linestyle="", label="beyond the panel"),
    ]
    title = f"Points of accuracy, {len(file.models)} models, profile {file.profile}"
    others = [c.id for c in file.claims if any(f.unit != "points" for f in c.contrasts)]
    if others:
        title += f". Not drawn, in other units: findings of ({'), ('.join(others)})"
    if any(row.wide for claim in file.claims for row in claim.contrasts):
        title += "\n95 % intervals: thick over documents, thin over families and documents"
    figure.legend(
        handles=handles, ncols=len(handles), loc="lower center", frameon=False, title=title
    )


def draw_gaps(grouping: Sequence[WrittenGrouping]) -> Figure:
    """Draw each gap of Table 1 by the sequences per rank; the first row's, as printed, dashed."""
    printed, *rows = grouping
    sizes = [row.sequences for row in rows]
    with rc_context({"font.size": _POINTS}):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes: Any = figure.subplots()
        for index, (first, second) in enumerate(GAPS):
            gaps = [row.gaps[index] for row in rows]
            effects = np.array([gap.effect for gap in gaps])
            ends = np.array([[gap.low, gap.high] for gap in gaps]).T
            axes.errorbar(
                sizes,
                effects,
                np.abs(ends - effects),
                color=drawing.COLOURS[index],
                marker="osD"[index],
                capsize=3,
                label=f"{first} − {second}".replace("_", " "),
            )
            in_print = {"color": drawing.COLOURS[index], "linestyle": "--", "alpha": 0.6}
            axes.axhline(printed.gaps[index].effect, **in_print)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set(xlabel="sequences that share a capacity", ylabel="points of accuracy, γ=1")
        title = "solid: measured here; dashed: Table 1, OLMoE"
        figure.legend(loc="outside lower center", ncols=len(GAPS), frameon=False, title=title)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=192, metadata={"Software": None})
    return buffer.getvalue()
