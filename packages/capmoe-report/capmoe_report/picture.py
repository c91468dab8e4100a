"""Pictures of the replication: verdicts as a forest plot, a panel for each claim, and gaps."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import method_title
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.routing.registry import method_names
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from capmoe_report.contrasts import GAPS
from capmoe_report.verdicts import Finding, Grouping, Outcome, VerdictFile

# Told apart by shape, too.
_LOOKS: Final[dict[Outcome, d.Look]] = {
    Outcome.HOLDS: {"color": d.BLUE, "marker": "o"},
    Outcome.FAILS: {"color": d.VERMILLION, "marker": "X"},
    Outcome.UNDECIDED: {"color": "#6e6e6e", "marker": "s"},
}
_WORDS: Final = {
    **{name.replace("_", " "): method_title(name) for name in method_names()},
    **read_data(__package__, "data/words.yaml", dict[str, dict[str, str]])["settings"],
}
"""What the settings in a label say to a reader."""
_SHARED: Final = re.compile(
    r" (?:(?:own |matched )?γ(?:=[\d.]+)?|on one rank|\d+ sequences|on [a-z_]+"
    r"|(?:images|text) first)"
)
"""What two sides of a contrast may have in common."""
_LINE: Final = 0.135
"""Height of a line of text, inches."""


def words(label: str) -> str:
    """Return the label of a contrast in words; what both sides have is said once, at the end."""
    settings = "|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True)))
    text = re.sub(rf"(?<![\w=])({settings})(?![\w=])", lambda match: _WORDS[match[1]], label)
    text = re.sub(r"(rounds|batch_size)=(\d+)", r"\2 \1", text).replace("batch_size", "sequences")
    first, minus, second = text.partition(" − ")
    for phrase in _SHARED.findall(first) if minus else ():
        if phrase in _SHARED.findall(second):
            first, second = (side.replace(phrase, "", 1) for side in (first, second))
            second += f",{phrase}"
    return first + minus + second


def draw(file: VerdictFile) -> Figure:
    """Draw the contrast that decides each claim, and below it the effects of the others."""
    panels = []
    for claim in file.claims:
        rows = [f for f in claim.contrasts if f.unit == "points" and f.effect is not None]
        rows.sort(key=lambda row: row.label != claim.decided_by)  # the one that decides is first
        if rows:
            verdict = " ".join([claim.verdict, claim.scope]).rstrip()
            title = textwrap.fill(f"({claim.id}) {verdict}: {claim.statement}", 62)
            others = f"; {len(rows) - 1} more" if len(rows) > 1 else ""
            panels.append((title, textwrap.fill(words(rows[0].label) + others, 70), rows))
    lines = sum(text.count("\n") + 1 for panel in panels for text in panel[:2])
    figure, grid = d.canvas(1.1 + _LINE * lines + 0.32 * len(panels), len(panels), sharex=True)
    for (axes,), (title, text, rows) in zip(grid, panels, strict=True):
        space = "\n " * (text.count("\n") + 1)
        axes.set_title(title + space, loc="left", fontweight="bold")
        axes.text(0, 1.08, text, transform=axes.transAxes, va="bottom", fontsize=7)
        _draw_rows(axes, rows)
    axes = grid[-1][0]
    ticks = [-30, -10, -3, -1, 0, 1, 3, 10, 30]
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_xlabel("points of accuracy")
    _legend(figure, file)
    return figure


def _draw_rows(axes: Any, rows: Sequence[Finding]) -> None:
    """Draw the first contrast with its margin, its intervals and each model, then the others."""
    first, *others = rows
    look = _LOOKS[first.verdict]
    # A bound of 0 is the line through all rows.
    margins = [bound for bound in first.bounds or () if bound]
    axes.vlines(margins, -0.5, 0.5, "black", linestyles="--", linewidth=1.0)
    models = list(first.models.values())
    axes.plot(models, [0] * len(models), "|", color="#a0a0a0", markersize=6)
    for ends, width in (((first.low, first.high), 2.0), (first.wide, 0.8)):
        if ends is not None and ends[0] is not None:
            axes.plot(ends, [0, 0], color=look["color"], linewidth=width)
    axes.plot([first.effect], [0], **look, markersize=5)
    for row in others:
        axes.plot([row.effect], [1], **_LOOKS[row.verdict], markersize=4, fillstyle="none")
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    axes.set_yticks([])
    axes.set_ylim(1.5 if others else 0.5, -0.5)
    axes.spines["left"].set_visible(False)


def _legend(figure: Figure, file: VerdictFile) -> None:
    handles = [Line2D([], [], **look, markersize=5, label=w.value) for w, look in _LOOKS.items()]
    handles += [
        Line2D([], [], color="#a0a0a0", marker="|", linestyle="", markersize=6, label="one model"),
        Line2D([], [], color="black", linestyle="--", linewidth=1.0, label="margin"),
    ]
    title = f"{len(file.models)} models, profile {file.profile}. Hollow: the further contrasts"
    others = [c.id for c in file.claims if any(f.unit != "points" for f in c.contrasts)]
    if others:
        title += f". Not drawn, in other units: findings of ({'), ('.join(others)})"
    if any(row.wide for claim in file.claims for row in claim.contrasts):
        title += ". 95 % intervals: thick over documents, thin over families and documents"
    place: Any = "outside lower center"
    figure.legend(handles=handles, ncols=3, loc=place, title=textwrap.fill(title, 70))


def draw_gaps(grouping: Sequence[Grouping]) -> Figure:
    """Draw each gap of Table 1 by the sequences per rank; the first row's, as printed, dashed."""
    printed, *rows = grouping
    sizes = [row.sequences for row in rows]
    figure, ((axes,),) = d.canvas(2.6)
    for index, (first, second) in enumerate(GAPS):
        gaps = [row.gaps[index] for row in rows]
        effects = np.array([gap.effect for gap in gaps])
        ends = np.array([[gap.low, gap.high] for gap in gaps]).T
        look: dict[str, Any] = {"color": d.COLOURS[index], "marker": d.MARKERS[index]}
        name = f"{method_title(first)} − {method_title(second)}"
        axes.errorbar(sizes, effects, np.abs(ends - effects), **look, capsize=3, label=name)
        effect = printed.gaps[index].effect
        axes.axhline(effect, color=d.COLOURS[index], linestyle="--", alpha=0.6)
    d.rule(axes, 0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set(xlabel="sequences that share a capacity", ylabel="points of accuracy, γ=1")
    axes.set_title("solid: measured here; dashed: Table 1, OLMoE")
    d.legend(figure)
    return figure
