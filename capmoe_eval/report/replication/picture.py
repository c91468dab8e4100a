"""The verdicts of the replication as a picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.paper.verdicts import CONFIRMED, CONTRADICTED, NOT_SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by shape, too: Okabe and Ito's blue, vermilion and grey.
_LOOK: Final = {CONFIRMED: ("#0072b2", "o"), CONTRADICTED: ("#d55e00", "X")}
_OTHER: Final = ("#7f7f7f", "s")


def draw(file: VerdictFile) -> Figure:
    """Draw every contrast's effect with its interval, and each model's effect beside it."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = [
        (claim.id, finding)
        for claim in file.claims
        for finding in claim.contrasts
        if finding.unit == "points" and finding.effect is not None
    ]
    figure = Figure(figsize=(7.2, 0.6 + 0.155 * len(rows)), layout="constrained")
    axes = figure.subplots()
    previous = ""
    for place, (key, finding) in enumerate(rows):
        colour, marker = _LOOK.get(finding.verdict, _OTHER)
        assert finding.effect is not None
        if finding.low is not None and finding.high is not None:
            axes.plot([finding.low, finding.high], [place, place], color=colour, linewidth=1.6)
        axes.plot(
            list(finding.models.values()), [place] * len(finding.models), "|", color="#999999"
        )
        axes.plot(finding.effect, place, marker, color=colour, markersize=4.5)
        if key != previous and place:
            axes.axhline(place - 0.5, color="#cccccc", linewidth=0.6)
        previous = key
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"({key}) {f.label}" for key, f in rows], fontsize=6.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xticks([-50, -20, -5, -2, 0, 2, 5, 20, 50])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("difference of accuracy in points (axis logarithmic beyond ±5)", fontsize=7.5)
    title = f"What routing costs: {len(file.models)} models, profile {file.profile}"
    axes.set_title(title, fontsize=8.5)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.5)
    axes.set_axisbelow(True)
    legend = [*((word, *look) for word, look in _LOOK.items()), (NOT_SHOWN, *_OTHER)]
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, label=name)
        for name, colour, marker in legend
    ]
    handles.append(Line2D([], [], color="#999999", marker="|", linestyle="", label="one model"))
    figure.legend(handles=handles, fontsize=7, ncols=4, loc="outside lower center", frameon=False)
    return figure


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170, metadata={"Software": None})
    return buffer.getvalue()
