"""Tables that are not of scores: settings, the tokens of a query, and speedups by workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.selection import LEFT_OUT
from capmoe_eval.experiment.timings.names import bench_command
from capmoe_eval.paper.benchmarks import Bench, ShownRun
from capmoe_eval.paper.layout import QueryLayout, SettingsLayout, WorkloadLayout
from capmoe_eval.paper.printed import MACHINE, find_rows
from capmoe_eval.report.tables.table import as_table

if TYPE_CHECKING:
    import pandas as pd

    from capmoe_eval.experiment.timings.schema import Point, Prefill, Timing

_PRINTED = ("Number of few-shot", "Metric")
_BOTH = ("Shots", "Metric", "Filter", "Shots (paper)", "Metric (paper)")
STUDY = "workload"


def settings_table(layout: SettingsLayout, ours: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Return a table of settings, the paper's alone or with ours before them.

    Ours are those of each task as in ``conf/tasks/``: ``fewshot``, ``metric`` and ``filter``.
    """
    notes, rows = [], {}
    for setting in layout.settings:
        printed = [str(setting["shots"]), setting["metric"]]
        texts = printed
        if ours is not None:
            settings = ours[setting["task"]]
            shots = "lm-eval's" if settings["fewshot"] is None else str(settings["fewshot"])
            stated = [shots, layout.metrics.get(settings["metric"], settings["metric"])]
            texts = [*stated, "–" if settings["filter"] == "none" else settings["filter"], *printed]
            if stated != printed:
                notes.append(
                    f"{setting['heading']} differs: ours {', '.join(stated)}; paper "
                    f"{', '.join(printed)}."
                )
        rows[setting["heading"]] = [{"text": text} for text in texts]
    if ours is not None and not notes:
        notes.append("All settings are the paper's. It names no filter of the answers.")
    cells = _cells("Task", rows, _PRINTED if ours is None else _BOTH)
    return as_table(layout, ["Task"], cells, notes)


def query_table(layout: QueryLayout, records: Iterable[Record]) -> pd.DataFrame:
    """Return the tokens of a query with an image, as records count them, beside the printed ones.

    They are means over the queries of one model without a limit, without its answers. A record that
    does not tell images and text apart is a UsageError.
    """
    record = next((record for record in records if record.cell.method.is_stock), None)
    (heading, *_), *lines = layout.words
    cells: list[list[dict[str, Any]]]
    if record is None:
        cells = [[{"command": f"capmoe-eval run experiment={layout.records}"}] * 2] * len(lines)
    elif record.load.modalities is None:
        raise UsageError(f"{record.path}: does not tell images and text apart; run it again")
    else:
        by = {name: part.tokens / record.n for name, part in record.load.modalities.items()}
        counts = by["image"], by["text"], by["image"] + by["text"]
        numbers = [(count, 100 * count / counts[-1]) for count in counts]
        files = (str(record.path),)
        cells = [[{"value": value, "records": files} for value in pair] for pair in numbers]
    both = zip(lines, cells, strict=True)
    rows = {label: [*ours, {"text": printed}] for (label, *_, printed), ours in both}
    notes = []
    if record:
        notes = [f"{record.model}: the mean over {record.n:,} queries of {record.task}."]
    columns = ("Token Count", "Share (%)", "Token Count (paper)")
    return as_table(layout, [heading], _cells(heading, rows, columns), notes)


def printed_query(layout: QueryLayout) -> pd.DataFrame:
    """Return the same table as the paper prints it."""
    (heading, *columns), *lines = layout.words
    rows = {label: [{"text": text} for text in texts] for label, *texts in lines}
    return as_table(layout, [heading], _cells(heading, rows, columns))


def workload_table(layout: WorkloadLayout, bench: Bench) -> pd.DataFrame:
    """Return a table of speedups: of one MoE layer, of a prefill, and the ideal of the layer."""
    printed = _printed_speedups(layout)
    run = next((run for run in bench.best(STUDY) if run.run.model == layout.model), None)
    places = layout.workloads.values()
    points = {p.place: p for p in run.run.points if p.place} if run else {}
    prefills = {place: point.prefill for place, point in points.items() if point.prefill}
    files = (str(run.study.path),) if run else ()

    def row(timed: Mapping[str, Point] | Mapping[str, Prefill]) -> list[dict[str, Any]]:
        timings = {p: _timing(layout, timed[p]) if p in timed else None for p in places}
        return [
            {"command": bench_command(STUDY)}
            if timing is None
            else {
                "value": timing.speedup.median,
                "low": timing.speedup.low,
                "high": timing.speedup.high,
                "published": printed[place],
                "ideal": timing.ideal_rank,
                "records": files,
            }
            for place, timing in timings.items()
        ]

    layer = row(points)
    rows = {"one MoE layer": layer}
    if prefills:
        count = next(iter(prefills.values())).layers
        rows[f"prefill, {count} MoE {'layer' if count == 1 else 'layers'}"] = row(prefills)
    if any("value" in cell for cell in layer):
        rows["ideal of the layer"] = [
            {"value": cell["ideal"], "records": files} if "value" in cell else cell
            for cell in layer
        ]
    notes = list(_notes(run, [points[p] for p in places if p in points])) if run else []
    notes += [f"{LEFT_OUT}: {line}" for line in bench.broken_of(STUDY)]
    return _of_workloads(layout, rows, notes, f" ({run.kind})" if run else "")


def printed_workloads(layout: WorkloadLayout) -> pd.DataFrame:
    """Return the same table as the paper prints it."""
    row = [{"value": value} for value in _printed_speedups(layout).values()]
    return _of_workloads(layout, {method_title(layout.method): row})


def _of_workloads(
    layout: WorkloadLayout,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    notes: Sequence[str] = (),
    kind: str = "",
) -> pd.DataFrame:
    cells = _cells("Speedup of", rows, [*layout.workloads])
    return as_table(layout, ["Speedup of"], cells, notes, layout.decimals, kind=kind)


def _cells(
    heading: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the cells of rows by their label; no row is compared with another."""
    for line, (label, cells) in enumerate(rows.items()):
        for column, cell in zip(columns, cells, strict=True):
            yield {"line": line, "block": line, heading: label, "column": column, **cell}


def _timing(layout: WorkloadLayout, timed: Point | Prefill) -> Timing | None:
    """Return the timing of the table's method, where a capacity bounds each expert."""
    key = (layout.method, layout.gamma)
    timings = (t for t in timed.timings if t.label and (t.label.name, t.label.gamma) == key)
    return next(timings, None)


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
