"""Tables that are not of scores: settings, the tokens of a query, and speedups by workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.selection import LEFT_OUT
from capmoe_eval.paper.benchmarks import Bench, circumstances, kind_text, ranks_text, widths_text
from capmoe_eval.paper.layout import QueryLayout, SettingsLayout, WorkloadLayout
from capmoe_eval.paper.printed import MACHINE, find_rows
from capmoe_eval.report.tables.table import as_table
from capmoe_eval.results.timings import EMULATED, bench_command

if TYPE_CHECKING:
    import pandas as pd

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
    times = bench.best(STUDY)
    times = times[(times["key"] == layout.model) & (times["phase"] == "total")]
    places = layout.workloads.values()
    # Where a capacity bounds each expert, which is the first of those with one γ.
    of_method = times[(times["method"] == layout.method) & (times["gamma"] == layout.gamma)]
    timed = {key: rows.iloc[0] for key, rows in of_method.groupby(["part", "place"])}

    def row(part: str) -> list[dict[str, Any]]:
        return [
            {
                "value": timing["speedup"],
                "low": timing["speedup_q1"],
                "high": timing["speedup_q3"],
                "published": printed[place],
                "ideal": timing["ideal"],
                "records": (timing["path"],),
            }
            if (timing := timed.get((part, place))) is not None
            else {"command": bench_command(STUDY)}
            for place in places
        ]

    layer = row("layer")
    rows = {"one MoE layer": layer}
    prefills = times.loc[(times["part"] == "prefill") & (times["place"] != ""), "layers"]
    if len(prefills):
        count = prefills.iloc[0]
        rows[f"prefill, {count} MoE {'layer' if count == 1 else 'layers'}"] = row("prefill")
    if any("value" in cell for cell in layer):
        rows["ideal of the layer"] = [
            {"value": cell["ideal"], "records": cell["records"]} if "value" in cell else cell
            for cell in layer
        ]
    points = times[times["place"].isin(places)].drop_duplicates("point")
    order = {place: number for number, place in enumerate(places)}
    points = points.sort_values("place", key=lambda names: names.map(order), kind="stable")
    notes = list(_notes(points)) if len(points) else []
    notes += [f"{LEFT_OUT}: {line}" for line in bench.broken_of(STUDY)]
    kind = f" ({kind_text(times['kind'].iloc[0])})" if len(times) else ""
    return _of_workloads(layout, rows, notes, kind)


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


def _notes(points: pd.DataFrame) -> Iterator[str]:
    """Yield how the points of a table, a row each, were timed."""
    run = points.iloc[0]
    peaks = sorted({f"{peak:.1f}" for peak in points["peak"]})
    timed = ", ".join(f"{row.batch} × {row.prompt}" for row in points.itertuples())
    yield from circumstances(points)
    yield (
        f"Layer {run['shape']}: {ranks_text(run)}, {widths_text(run)}, peak load "
        f"{' or '.join(peaks)} × mean; batch × prompt as timed: {timed}. In brackets: quartiles."
    )
    yield "Ideal: pairs of the fullest rank without a capacity over those with one."
    yield (
        f"published: what the paper prints, of {MACHINE} and other code, and in parentheses our "
        "difference to it. It does not say whether a layer or the model was timed: its number "
        "stands beside both."
    )
    if run["kind"] == EMULATED:
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
