"""Format the result table that a run prints."""

from __future__ import annotations

from collections.abc import Sequence

from capmoe_eval.experiment.record import Record

_HEADINGS = (
    "task",
    "model",
    "method",
    "score",
    "±",
    "n",
    "effective γ",
    "dropped",
    "peak",
    "record",
)
_MOST = 48


def summary(records: Sequence[Record]) -> str:
    """Return a table of records: score, capacity, drop rate, and peak load, in text.

    ``effective γ`` is the applied capacity over the mean load, empty without a capacity. ``peak``
    is the highest load of an expert over the mean load, in any layer and forward, before and after
    drops.
    """
    rows = [_HEADINGS, *(_row(record) for record in records[:_MOST])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    right = {"score", "±", "n", "effective γ", "dropped"}
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
        "" if load.effective_gamma is None else f"{load.effective_gamma:.2f}",
        f"{100 * load.drop_rate:.1f} %",
        f"{before:.2f} → {after:.2f}",
        str(record.path),
    )


def rounding_warning(record: Record) -> str | None:
    """Return a line if rounding moved the capacity by more than a tenth of what γ says, or None.

    A γ above E/K is compared as E/K: the capacity is then all tokens of the group.
    """
    method, effective, mean = record.cell.method, record.load.effective_gamma, record.load.mean_load
    if method.gamma is None or effective is None or mean is None:
        return None
    nominal = min(method.gamma, max(layer.n_experts / layer.top_k for layer in record.layers))
    if abs(effective - nominal) <= nominal / 10:
        return None
    group = "sequence" if method.scope == "sequence" else "rank"
    fix = "larger batches (batch_size) or fewer ranks (ep_size)"
    return (
        f"gamma={method.gamma:g}: rounding makes it {effective:.2f}, with {mean:.1f} tokens per "
        f"{method.granularity} and {group} ({record.cell}); take "
        f"{'scope=batch' if group == 'sequence' else fix}, and compare cells by 'effective γ'"
    )
