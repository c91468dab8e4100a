"""The table of speedups by workload, from the file of an efficiency study, and as printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    found = [one for one in bench.best(STUDY) if one.run.model == layout.model]
    one = found[0] if found else None
    missing = Missing(bench_command(STUDY))
    points = {p.place: p for p in one.run.points} if one else {}
    columns = [points.get(place) for place in layout.workloads.values()]
    beside = [printed[place] for place in layout.workloads.values()]

    def row(name: str, timings: Sequence[Timing | None]) -> Row:
        cells = [
            missing if timing is None else _entry(timing, number)
            for timing, number in zip(timings, beside, strict=True)
        ]
        return Row((name,), tuple(cells))

    layers = [None if point is None else _timing(layout, point) for point in columns]
    rows = [row("one MoE layer", layers)]
    prefills = [point.prefill for point in points.values() if point.prefill]
    if prefills:
        parts = [None if point is None else point.prefill for point in columns]
        timed = [None if part is None else _timing(layout, part) for part in parts]
        count = prefills[0].layers
        rows.append(row(f"prefill, {count} MoE {'layer' if count == 1 else 'layers'}", timed))
    if any(layers):
        ideal = [missing if t is None else Entry(t.ideal_rank) for t in layers]
        rows.append(Row(("ideal of the layer",), tuple(ideal)))
    notes = tuple(_notes(one, [p for p in columns if p])) if one else ()
    return _table(layout, rows, f" ({one.kind})" if one else "", notes)


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
    """Return the row of the table's method, where a capacity bounds each expert."""
    for row in timed.timings:
        label = row.label
        if label and (label.name, label.gamma) == (layout.method, layout.gamma):
            return row
    return None


def _entry(timing: Timing, printed: float) -> Entry:
    speedup = timing.speedup
    return Entry(
        speedup.median,
        quartiles=(speedup.low, speedup.high),
        published=Published(printed, speedup.median - printed),
    )


def _notes(one: Shown, points: Sequence[Point]) -> list[str]:
    study = one.study
    peaks = sorted({f"{point.routing.peak:.1f}" for point in points})
    timed = ", ".join(f"{point.batch} × {point.prompt}" for point in points)
    notes = [f"{study.note}."] if study.note else [f"Measured on real ranks ({study.backend})."]
    notes += [
        f"Layer {one.run.shape.name}: {one.ranks}, {one.widths}, {study.dtype}, peak load "
        f"{' or '.join(peaks)} × mean; batch × prompt as timed: {timed}.",
        *([f"Sizes: {study.why.rstrip('.')}."] if study.why else []),
        *([f"Routing: {one.run.why.rstrip('.')}."] if one.run.why else []),
        f"Medians, and in brackets quartiles, of {study.repeats} rounds on {study.machine} "
        f"({study.path.name}).",
        "Ideal: pairs of the fullest rank without a capacity over those with one.",
        f"published: what the paper prints, of {MACHINE} and other code, and in parentheses our "
        "difference to it. It does not say whether a layer or the model was timed: its number "
        "stands beside both.",
    ]
    if study.emulated:
        notes.append("No emulation confirms or refutes a printed speedup.")
    return notes
