"""The gaps between ways to keep tokens by the sequences that share a capacity, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib import rc_context
from matplotlib.figure import Figure

from capmoe_eval.paper.replication.grouping import GAPS
from capmoe_eval.paper.verdict_file import WrittenGrouping

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73")


def draw_gaps(grouping: Sequence[WrittenGrouping]) -> Figure:
    """Draw each gap of Table 1 by the sequences per rank; the first row's, as printed, dashed."""
    printed, *rows = grouping
    sizes = [row.sequences or 0 for row in rows]
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for index, ((first, second), colour) in enumerate(zip(GAPS, _COLOURS, strict=True)):
            found = [row.gaps[index] for row in rows]
            ends = [(gap.effect or 0.0, gap.low or 0.0, gap.high or 0.0) for gap in found]
            axes.errorbar(
                sizes,
                [effect for effect, _, _ in ends],
                yerr=[[e - low for e, low, _ in ends], [high - e for e, _, high in ends]],
                color=colour,
                marker="osD"[index],
                capsize=3,
                label=f"{first} − {second}".replace("_", " "),
            )
            axes.axhline(printed.gaps[index].effect or 0.0, color=colour, linestyle="--", alpha=0.6)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("sequences that share a capacity")
        axes.set_ylabel("points of accuracy, γ=1")
        told = "solid: measured here; dashed: Table 1, OLMoE"
        figure.legend(loc="outside lower center", ncols=len(GAPS), frameon=False, title=told)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
