"""Points that methods lose against no limit: measured, and drawn against what is bounded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Unpaired, pair
from capmoe_eval.paper.statistics import interval
from capmoe_eval.report.figures import style
from capmoe_eval.report.figures.catalogue import Numbers
from capmoe_eval.report.figures.pooling import by_task
from capmoe_eval.report.figures.shapes import within
from capmoe_eval.report.figures.style import column


def lost(
    stock: Iterable[Record], records: Iterable[Record], tasks: Collection[str]
) -> dict[str, float] | str:
    """Return the points lost against the stock model, or why they are not known.

    ``lost`` is a mean over tasks that count equally, with a 95 % interval over documents from
    ``low`` to ``high``.
    """
    ordered = sorted(tasks)  # as in the effects of claims
    sides = by_task(stock, ordered), by_task(records, ordered)
    if not all(sides):
        return "not every task is there"
    differences = {}
    for task, without, bounded in zip(ordered, *sides, strict=True):
        paired = pair(*([one.documents for one in side] for side in (without, bounded)))
        if isinstance(paired, Unpaired):
            return paired.reason
        differences[task] = 100 * paired.units
    return dict(zip(("lost", "low", "high"), interval(differences), strict=True))


def draw_losses(
    rows: Sequence[Numbers],
    loads: Mapping[str, str],
    height: float,
    lines: Callable[[Numbers, str], Iterable[tuple[Sequence[Numbers], Numbers]]],
) -> tuple[Figure, Any]:
    """Return a figure of points lost, of a height in inches, and its panels [rows, loads].

    ``loads`` names the axes by the fields of points that losses are held against; ``lines`` returns
    the lines of a row against one of them, the points and the look of each.
    """
    shared: Numbers = {"squeeze": False, "sharey": "row", "sharex": "col"}
    figure, grid = style.subplots(style.PAGE, height, max(len(rows), 1), len(loads), **shared)
    for row, panels in zip(rows, grid, strict=False):
        for load, axes in zip(loads, panels, strict=True):
            for points, look in lines(row, load):
                thin = look | {"elinewidth": 0.5, "capsize": 1}
                axes.errorbar(column(points, load), *within(points, "lost"), **thin)
            axes.axhline(0, color=style.BLACK, linewidth=0.5)
            axes.grid()
    for name, axes in zip(loads.values(), grid[-1], strict=True):
        axes.set_xlabel(name)
    return figure, grid
