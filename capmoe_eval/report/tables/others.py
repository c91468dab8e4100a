"""Tables that are not of scores: settings, the tokens of a query, and speedups by workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.selection import LEFT_OUT
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, ShownRun
from capmoe_eval.paper.layout import QueryLayout, SettingsLayout, WorkloadLayout
from capmoe_eval.paper.printed import MACHINE, find_rows
from capmoe_eval.report.tables.table import (
    CellText,
    Entry,
    EntryPart,
    Missing,
    PrintedNumber,
    Row,
    Table,
)

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Point, Prefill, Timing

_PRINTED = ("Number of few-shot", "Metric")
_BOTH = ("Shots", "Metric", "Filter", "Shots (paper)", "Metric (paper)")
STUDY = "workload"


def settings_table(layout: SettingsLayout, ours: Mapping[str, Any] | None = None) -> Table:
    """Lay out a table of settings, the paper's alone or with ours before them.

    Ours are those of each task as in ``conf/tasks/``: ``fewshot``, ``metric`` and ``filter``.
    """
    notes, rows = [], []
    for setting in layout.settings:
        printed = (str(setting.shots), setting.metric)
        cells: tuple[str, ...] = printed
        if ours is not None:
            settings = ours[setting.task]
            shots = "lm-eval's" if settings["fewshot"] is None else str(settings["fewshot"])
            stated = (shots, layout.metrics.get(settings["metric"], settings["metric"]))
            cells = (*stated, "–" if settings["filter"] == "none" else settings["filter"], *printed)
            if stated != printed:
                notes.append(
                    f"{setting.heading} differs: ours {', '.join(stated)}; paper "
                    f"{', '.join(printed)}."
                )
        rows.append(Row((setting.heading,), tuple(map(CellText, cells))))
    if ours is not None and not notes:
        notes.append("All settings are the paper's. It names no filter of the answers.")
    return Table.of(layout, ["Task"], _PRINTED if ours is None else _BOTH, [rows], notes)


def query_table(layout: QueryLayout, records: Iterable[Record]) -> Table:
    """Lay out the tokens of a query with an image, as records count them, beside the printed ones.

    They are means over the queries of one model without a limit, without its answers. A record that
    does not tell images and text apart is a UsageError.
    """
    record = next((record for record in records if record.cell.method.is_stock), None)
    (heading, *_), *lines = layout.words
    columns = ("Token Count", "Share (%)", "Token Count (paper)")
    cells: Sequence[tuple[Entry | Missing, ...]]
    if record is None:
        cells = [(Missing(f"capmoe-eval run experiment={layout.records}"),) * 2] * len(lines)
    elif record.load.modalities is None:
        raise UsageError(f"{record.path}: does not tell images and text apart; run it again")
    else:
        by = {name: part.tokens / record.n for name, part in record.load.modalities.items()}
        counts = by["image"], by["text"], by["image"] + by["text"]
        cells = [
            tuple(
                Entry(value, parts=(EntryPart(name, value, record),))
                for name, value in zip(columns, (count, 100 * count / counts[-1]), strict=False)
            )
            for count in counts
        ]
    # A block each: counts are not compared with each other.
    blocks = [
        [Row((label,), (*ours, CellText(printed)))]
        for (label, *_, printed), ours in zip(lines, cells, strict=True)
    ]
    notes = []
    if record:
        notes = [f"{record.model}: the mean over {record.n:,} queries of {record.task}."]
    return Table.of(layout, [heading], columns, blocks, notes)


def printed_query(layout: QueryLayout) -> Table:
    """Lay out the same table as the paper prints it."""
    (heading, *columns), *lines = layout.words
    rows = [Row((label,), tuple(map(CellText, cells))) for label, *cells in lines]
    return Table.of(layout, [heading], columns, [rows])


def workload_table(layout: WorkloadLayout, bench: Bench) -> Table:
    """Lay out a table of speedups: of one MoE layer, of a prefill, and the ideal of the layer."""
    printed = _printed_speedups(layout)
    run = next((run for run in bench.best(STUDY) if run.run.model == layout.model), None)
    places = layout.workloads.values()
    points = {p.place: p for p in run.run.points if p.place} if run else {}
    prefills = {place: point.prefill for place, point in points.items() if point.prefill}

    def row(
        name: str,
        timed: Mapping[str, Point] | Mapping[str, Prefill],
        entry: Callable[[Timing, float], Entry],
    ) -> Row:
        cells: list[Entry | Missing] = []
        for place in places:
            timing = _timing(layout, timed[place]) if place in timed else None
            if run and timing:
                filled = entry(timing, printed[place])
                parts = (EntryPart(place, filled.value, run.study.path),)
                cells.append(dataclasses.replace(filled, parts=parts))
            else:
                cells.append(Missing(bench_command(STUDY)))
        return Row((name,), tuple(cells))

    rows = [row("one MoE layer", points, _entry)]
    if prefills:
        count = next(iter(prefills.values())).layers
        name = f"prefill, {count} MoE {'layer' if count == 1 else 'layers'}"
        rows.append(row(name, prefills, _entry))
    if any(isinstance(cell, Entry) for cell in rows[0].entries):
        rows.append(row("ideal of the layer", points, lambda timing, _: Entry(timing.ideal_rank)))
    notes = list(_notes(run, [points[p] for p in places if p in points])) if run else []
    notes += [f"{LEFT_OUT}: {line}" for line in bench.broken_of(STUDY)]
    return _of_workloads(layout, rows, notes, f" ({run.kind})" if run else "")


def printed_workloads(layout: WorkloadLayout) -> Table:
    """Lay out the same table as the paper prints it."""
    cells = tuple(map(Entry, _printed_speedups(layout).values()))
    return _of_workloads(layout, [Row((method_title(layout.method),), cells)])


def _of_workloads(
    layout: WorkloadLayout, rows: Iterable[Row], notes: Sequence[str] = (), kind: str = ""
) -> Table:
    blocks, headings = [[row] for row in rows], ["Speedup of"]
    return Table.of(layout, headings, layout.workloads, blocks, notes, layout.decimals, kind=kind)


def _timing(layout: WorkloadLayout, timed: Point | Prefill) -> Timing | None:
    """Return the timing of the table's method, where a capacity bounds each expert."""
    key = (layout.method, layout.gamma)
    timings = (t for t in timed.timings if t.label and (t.label.name, t.label.gamma) == key)
    return next(timings, None)


def _entry(timing: Timing, printed: float) -> Entry:
    speedup = timing.speedup
    return Entry(
        speedup.median,
        quartiles=(speedup.low, speedup.high),
        published=PrintedNumber(printed, speedup.median - printed),
    )


def _notes(run: ShownRun, points: Sequence[Point]) -> Iterator[str]:
    study = run.study
    peaks = sorted({f"{point.routing.peak:.1f}" for point in points})
    timed = ", ".join(f"{point.batch} × {point.prompt}" for point in points)
    yield f"{study.note}." if study.note else f"Measured on real ranks ({study.backend})."
    yield (
        f"Layer {run.run.shape.name}: {run.ranks}, {run.widths}, {study.dtype}, peak load "
        f"{' or '.join(peaks)} × mean; batch × prompt as timed: {timed}."
    )
    if study.why:
        yield f"Sizes: {study.why.rstrip('.')}."
    if run.run.why:
        yield f"Routing: {run.run.why.rstrip('.')}."
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


def _printed_speedups(layout: WorkloadLayout) -> dict[str, float]:
    """Return the printed speedup of each workload of a table, by the workload as printed."""
    rows = find_rows(
        {
            "version": layout.version,
            "table": layout.number,
            "model": layout.model,
            "method": method_title(layout.method),
            "gamma": layout.gamma,
        }
    )
    printed = {row.variant: row.values["Speedup"] for row in rows}
    return {place: printed[place] for place in layout.workloads.values()}
