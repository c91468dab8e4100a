"""Format the result table that a run prints."""

from __future__ import annotations

from collections.abc import Sequence

from capmoe_eval.experiment.record import Record

_HEADINGS = ("task", "model", "method", "score", "±", "n", "dropped", "peak", "record")
_MOST = 48


def summary(records: Sequence[Record]) -> str:
    """Return a table of records: score, drop rate, and peak load before and after, in text.

    ``peak`` is the highest load of an expert over the mean load, in any layer and forward, before
    and after drops.
    """
    rows = [_HEADINGS, *(_row(record) for record in records[:_MOST])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    right = {"score", "±", "n", "dropped"}
    lines = [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ).rstrip()
        for row in rows
    ]
    if len(records) > _MOST:
        lines.append(f"… and {len(records) - _MOST} more")
    return "\n".join(lines)


def _row(record: Record) -> tuple[str, ...]:
    load = record.load
    before, after = load.peak_before, load.peak_after
    return (
        record.task,
        record.model,
        record.cell.label,
        f"{100 * record.value:.1f}",
        "" if record.stderr is None else f"{100 * record.stderr:.1f}",
        str(record.n),
        f"{100 * load.drop_rate:.1f} %",
        f"{before:.2f} → {after:.2f}",
        str(record.path),
    )
