"""The page ``docs/reference/rehearsal.md``, from its file in ``results/bench/``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from capmoe_benchmarks.rehearsal.checkpoint import PUBLISHED
from capmoe_benchmarks.rehearsal.grid import H100

from capmoe_eval.results.timings import read_evaluation
from tests.pages import DOCS, ROOT

DOCUMENT = DOCS / "reference" / "rehearsal.md"
FILE = ROOT / "results" / "bench" / "rehearsal.json"
_GIB = 2**30
_COLUMNS = (
    *("model", "layers", "cells", "failed"),
    *("memory: error, %", "time: error, %"),
)
_COSTS = (
    *("table", "model", "cells", "tokens, millions", "new tokens, millions"),
    *("GiB", "GPUs", "GPU hours", "hours on eight"),
)
TEXT = (Path(__file__).parent / "rehearsal.md").read_text(encoding="utf-8")


def text() -> str:
    """Return the page."""
    file = read_evaluation(FILE)
    rows = file["models"]
    rehearsed = [row["model"] for row in rows]
    left = [name for each in PUBLISHED for name in each.models if name not in rehearsed]
    large = dict.fromkeys(row["model"] for row in file["grid"] if row["gpus"] > 1)
    return TEXT.format(
        machine="{device}: {name}".format_map(file["machine"]),
        limit=rows[0]["limit"],
        new=rows[0]["new"],
        large=" and ".join(large),
        absent=f"Not rehearsed, with the sizes of others: {', '.join(left) or 'none'}.",
        models=_table(_COLUMNS, _models(rows)),
        gpu=H100.name,
        tera=H100.flops / 1e12,
        bandwidth=H100.bandwidth / 1e12,
        memory=H100.memory / 1e9,
        compute=100 * H100.compute_share,
        reading=100 * H100.bandwidth_share,
        host=1000 * H100.layer_seconds,
        slower=H100.compute_share / 0.1,
        costs=_table(_COSTS, _costs(file["grid"])),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _models(rows: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    for row in rows:
        cells = row["cells"]
        yield [
            row["model"],
            "{} of {}".format(*row["layers"]),
            str(len(cells)),
            str(sum("failure" in cell for cell in cells)),
            _error(cells, "bytes"),
            _error(cells, "seconds"),
        ]


def _error(cells: Sequence[Mapping[str, Any]], what: str) -> str:
    errors = [100 * (c[what] / c[f"{what}_forecast"] - 1) for c in cells if "failure" not in c]
    if not errors:
        return ""
    middle, low, high = statistics.median(errors), min(errors), max(errors)
    return f"{middle:+.0f} [{low:+.0f}, {high:+.0f}]".replace("-", "−")


def _costs(grid: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    for table in dict.fromkeys(row["table"] for row in grid):
        of_table = [row for row in grid if row["table"] == table]
        for row in of_table:
            yield [
                table.replace("table", "Table "),
                row["model"],
                str(row["cells"]),
                f"{row['tokens'] / 1e6:,.0f}",
                f"{row['new_tokens'] / 1e6:.1f}",
                f"{(row['weights'] + row['batch']) / _GIB:.0f}",
                str(row["gpus"]),
                *_hours([row]),
            ]
        if len(of_table) > 1:
            yield [table.replace("table", "Table "), "all", *[""] * 5, *_hours(of_table)]


def _hours(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return GPU hours, and the hours of eight GPUs, of which none has less than a longest cell."""
    hours = sum(row["gpu_hours"] for row in rows)
    longest = max(row["longest_cell_hours"] for row in rows)
    return [f"{hours:.1f}", f"{max(hours / 8, longest):.1f}"]
