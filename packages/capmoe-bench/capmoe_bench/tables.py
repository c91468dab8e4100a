"""Table 10: speedup by workload, of the study ``workload`` beside what the paper prints.

The suite imports it by an entry point.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from capmoe_eval.experiment.configuration import LEFT_OUT
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import WorkloadLayout
from capmoe_eval.report.tables.filled import of_workloads, printed_speedups

from capmoe_bench.timings import (
    EMULATED,
    MACHINE,
    bench_command,
    circumstances,
    ranks_text,
    read_bench,
    widths_text,
)

STUDY: Final = "workload"


def workload_table(layout: WorkloadLayout, folder: Path) -> pd.DataFrame:
    """Return a table of speedups: of one MoE layer, of a prefill, and the ideal of the layer.

    Args:
        layout: The table of the paper.
        folder: The directory of the files of benchmarks.
    """
    printed, bench = printed_speedups(layout), read_bench(folder, STUDY)
    times = bench.best(STUDY)
    times = times[(times["model"] == layout.model) & (times["phase"] == "total")]
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
            else {}
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
    notes += [f"{LEFT_OUT}: {line}" for line in bench.broken]
    kind = f" ({times['measured'].iloc[0]})" if len(times) else ""
    commands = [] if all(cell for row in rows.values() for cell in row) else [bench_command(STUDY)]
    return of_workloads(layout, rows, notes, kind, commands)


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
