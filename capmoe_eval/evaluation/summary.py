"""Format the result table that a run prints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from capmoe_eval.experiment.record import Record

# Columns of numbers, whose ends are in line.
_NUMBERS = {"score", "±", "n", "effective γ", "dropped"}
SHOWN = 48
"""Records that are shown, the first of all."""


def summary(records: Sequence[Record], number: int) -> str:
    """Return a table in text of the first of some records: score, capacity, drop rate, peak load.

    ``effective γ`` is the applied capacity over the mean load, empty without a capacity. ``peak``
    is the highest load of an expert over the mean load, in any layer and forward, before and after
    drops.
    """
    lines = [aligned([_row(record) for record in records], _NUMBERS)]
    if number > len(records):
        lines.append(f"… and {number - len(records)} more")
    return "\n".join(lines)


def aligned(rows: Sequence[Mapping[str, str]], numbers: Collection[str]) -> str:
    """Return rows with the same headings, at least one, as a table in text.

    ``numbers`` are the headings of columns of numbers, whose ends are in line.
    """
    columns = {heading: [heading, *(row[heading] for row in rows)] for heading in rows[0]}
    for heading, cells in columns.items():
        width = max(map(len, cells))
        justify = str.rjust if heading in numbers else str.ljust
        columns[heading] = [justify(cell, width) for cell in cells]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns.values(), strict=True))


def _row(record: Record) -> dict[str, str]:
    load = record.load
    return {
        "task": record.task,
        "model": record.model,
        "method": record.cell.label,
        "score": f"{100 * record.value:.1f}",
        "±": "" if record.stderr is None else f"{100 * record.stderr:.1f}",
        "n": str(record.n),
        "effective γ": "" if load.effective_gamma is None else f"{load.effective_gamma:.2f}",
        "dropped": f"{100 * load.drop_rate:.1f} %",
        "peak": f"{load.peak_before:.2f} → {load.peak_after:.2f}",
        "record": str(record.path),
    }


def rounding_warning(record: Record) -> str | None:
    """Return a line if rounding moved the capacity by more than a tenth of what γ says, or None.

    A γ above E/K is compared as E/K: the capacity is then all tokens of the group.
    """
    method, effective, mean = record.cell.method, record.load.effective_gamma, record.load.mean_load
    gamma = method.uniform_gamma
    if gamma is None or effective is None or mean is None:
        return None
    nominal = min(gamma, max(layer.n_experts / layer.top_k for layer in record.layers))
    if abs(effective - nominal) <= nominal / 10:
        return None
    group = "sequence" if method.scope == "sequence" else "rank"
    fix = "larger batches (batch_size) or fewer ranks (ep_size)"
    return (
        f"gamma={gamma:g}: rounding makes it {effective:.2f}, with {mean:.1f} tokens per "
        f"{method.granularity} and {group} ({record.cell}); take "
        f"{'scope=batch' if group == 'sequence' else fix}, and compare cells by 'effective γ'"
    )
