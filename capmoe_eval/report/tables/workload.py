"""The table of speedups by workload, from the file of an efficiency study, and as printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from capmoe_eval.experiment.names import TITLES
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, Shown
from capmoe_eval.paper.layout import WorkloadLayout
from capmoe_eval.paper.printed import MACHINE
from capmoe_eval.report.tables.table import Block, Entry, Missing, Published, Row, Table

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Point, Prefill, Timing

STUDY = "workload"


def workload_table(layout: WorkloadLayout, bench: Bench, printed: Mapping[str, float]) -> Table:
    """Lay out a table of speedups: of one MoE layer, of a prefill, and the ideal of the layer.

    Args:
        layout: The table.
        bench: What the benchmarks left.
        printed: The paper's speedup of each workload.
    """
    one = next((one for one in bench.best(STUDY) if one.run.model == layout.model), None)
    places = layout.workloads.values()
    points = {p.place: p for p in one.run.points if p.place} if one else {}
    prefills = {place: point.prefill for place, point in points.items() if point.prefill}

    def row(
        name: str,
        timed: Mapping[str, Point] | Mapping[str, Prefill],
        entry: Callable[[Timing, float], Entry],
    ) -> Row:
        timings = {place: _timing(layout, found) for place, found in timed.items()}
        cells = [
            Missing(bench_command(STUDY)) if timing is None else entry(timing, printed[place])
            for place, timing in ((place, timings.get(place)) for place in places)
        ]
        return Row((name,), tuple(cells))

    rows = [row("one MoE layer", points, _entry)]
    if prefills:
        count = next(iter(prefills.values())).layers
        name = f"prefill, {count} MoE {'layer' if count == 1 else 'layers'}"
        rows.append(row(name, prefills, _entry))
    if any(isinstance(cell, Entry) for cell in rows[0].entries):
        rows.append(row("ideal of the layer", points, lambda timing, _: Entry(timing.ideal_rank)))
    notes = _notes(one, [points[place] for place in places if place in points]) if one else ()
    return _table(layout, rows, f" ({one.kind})" if one else "", tuple(notes))


def printed_workloads(layout: WorkloadLayout, printed: Mapping[str, float]) -> Table:
    """Lay out the same table as the paper prints it."""
    cells = tuple(Entry(printed[place]) for place in layout.workloads.values())
    return _table(layout, [Row((TITLES[layout.method],), cells)])


def _table(
    layout: WorkloadLayout, rows: Sequence[Row], kind: str = "", notes: tuple[str, ...] = ()
) -> Table:
    return Table(
        name=layout.key,
        title=layout.title.format(kind=kind),
        caption=layout.caption,
        label_headings=("Speedup of",),
        columns=tuple(layout.workloads),
        blocks=tuple(Block((row,)) for row in rows),
        decimals=layout.decimals,
        notes=notes,
    )


def _timing(layout: WorkloadLayout, timed: Point | Prefill) -> Timing | None:
    """Return the timing of the table's method, where a capacity bounds each expert."""
    wanted = (layout.method, layout.gamma)
    found = (t for t in timed.timings if t.label and (t.label.name, t.label.gamma) == wanted)
    return next(found, None)


def _entry(timing: Timing, printed: float) -> Entry:
    speedup = timing.speedup
    return Entry(
        speedup.median,
        quartiles=(speedup.low, speedup.high),
        published=Published(printed, speedup.median - printed),
    )


def _notes(one: Shown, points: Sequence[Point]) -> Iterator[str]:
    study = one.study
    peaks = sorted({f"{point.routing.peak:.1f}" for point in points})
    timed = ", ".join(f"{point.batch} × {point.prompt}" for point in points)
    yield f"{study.note}." if study.note else f"Measured on real ranks ({study.backend})."
    yield (
        f"Layer {one.run.shape.name}: {one.ranks}, {one.widths}, {study.dtype}, peak load "
        f"{' or '.join(peaks)} × mean; batch × prompt as timed: {timed}."
    )
    if study.why:
        yield f"Sizes: {study.why.rstrip('.')}."
    if one.run.why:
        yield f"Routing: {one.run.why.rstrip('.')}."
    yield (
        f"Medians, and in brackets quartiles, of {study.repeats} rounds on {study.machine} "
        f"({study.path.name})."
    )
    yield "Ideal: pairs of the fullest rank without a capacity over those with one."
    yield (
        f"published: what the paper prints, of {MACHINE} and other code, and in parentheses our "
        "difference to it. It does not say whether a layer or the model was timed: its number "
        "stands beside both."
    )
    if study.emulated:
        yield "No emulation confirms or refutes a printed speedup."
