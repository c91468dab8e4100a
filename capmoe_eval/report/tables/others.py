"""Tables that are not of scores: settings, the tokens of a query, and speedups by workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.names import method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import ALL_TASKS, PaperTable, WorkloadLayout
from capmoe_eval.paper.printed import find_rows
from capmoe_eval.report.tables.table import as_table

if TYPE_CHECKING:
    import pandas as pd

QUERIES: Final = "table4"
"""The experiment whose records without a limit count the tokens of Table 8's queries."""
METRICS: Final = {"acc": "Accuracy", "acc_norm": "Accuracy (Norm)", "exact_match": "Exact Match"}
"""The metrics of Table 5 by their names in ``conf/tasks/``."""


def printed_words(layout: PaperTable) -> pd.DataFrame:
    """Return a table of texts as the paper prints it."""
    (heading, *columns), *lines = layout.words
    rows = {label: [{"text": text} for text in texts] for label, *texts in lines}
    return as_table(layout, [heading], _cells(heading, rows, columns))


def settings_table(layout: PaperTable) -> pd.DataFrame:
    """Return a table of settings, ours before the paper's.

    Ours are ``fewshot``, ``metric`` and ``filter`` of each task in ``conf/tasks/``.
    """
    notes, rows = [], {}
    tasks = {column.heading: column.task for column in ALL_TASKS}
    (heading, *_), *lines = layout.words
    for label, *printed in lines:
        settings = load_option("tasks", tasks[label])[tasks[label]]
        shots = "lm-eval's" if settings["fewshot"] is None else str(settings["fewshot"])
        stated = [shots, METRICS.get(settings["metric"], settings["metric"])]
        texts = [*stated, "–" if settings["filter"] == "none" else settings["filter"], *printed]
        if stated != printed:
            theirs = ", ".join(printed)
            notes.append(f"{label} differs: ours {', '.join(stated)}; paper {theirs}.")
        rows[label] = [{"text": text} for text in texts]
    notes = notes or ["All settings are the paper's. It names no filter of the answers."]
    columns = ("Shots", "Metric", "Filter", "Shots (paper)", "Metric (paper)")
    return as_table(layout, [heading], _cells(heading, rows, columns), notes)


def query_table(layout: PaperTable, records: Iterable[Record], command: str) -> pd.DataFrame:
    """Return the tokens of a query with an image, as records count them, beside the printed ones.

    They are means over the queries of one model without a limit, without its answers; ``command``
    computes it. A record that does not tell images and text apart is a UsageError.
    """
    record = next((record for record in records if record.cell.method.is_stock), None)
    (heading, *_), *lines = layout.words
    cells: list[list[dict[str, Any]]]
    notes, commands = [], []
    if record is None:
        cells, commands = [[{}] * 2] * len(lines), [command]
    elif record.load.modalities is None:
        raise UsageError(f"{record.path}: does not tell images and text apart; run it again")
    else:
        by = {name: part.tokens / record.n for name, part in record.load.modalities.items()}
        counts = by["image"], by["text"], by["image"] + by["text"]
        numbers = [(count, 100 * count / counts[-1]) for count in counts]
        cells = [[{"value": value, "records": (str(record.path),)} for value in p] for p in numbers]
        notes = [f"{record.model}: the mean over {record.n:,} queries of {record.task}."]
    both = zip(lines, cells, strict=True)
    rows = {label: [*ours, {"text": printed}] for (label, *_, printed), ours in both}
    columns = ("Token Count", "Share (%)", "Token Count (paper)")
    return as_table(layout, [heading], _cells(heading, rows, columns), notes, commands=commands)


def printed_workloads(layout: WorkloadLayout) -> pd.DataFrame:
    """Return the same table as the paper prints it."""
    row = [{"value": value} for value in printed_speedups(layout).values()]
    return of_workloads(layout, {method_title(layout.method): row})


def of_workloads(
    layout: WorkloadLayout,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    notes: Sequence[str] = (),
    kind: str = "",
    commands: Sequence[str] = (),
) -> pd.DataFrame:
    """Return a table of speedups, a row for each of ``rows``, with its label."""
    cells = _cells("Speedup of", rows, [*layout.workloads])
    return as_table(layout, ["Speedup of"], cells, notes, layout.decimals, commands, kind=kind)


def _cells(
    heading: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the cells of rows by their label; no row is compared with another."""
    for line, (label, cells) in enumerate(rows.items()):
        for column, cell in zip(columns, cells, strict=True):
            yield {"line": line, "block": line, heading: label, "column": column, **cell}


def printed_speedups(layout: WorkloadLayout) -> dict[str, float]:
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
