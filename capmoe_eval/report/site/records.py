"""The page of all records, and the page of each: score, loads, the command to compute it again."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from capmoe_eval.experiment.cell import CELL_FIELDS
from capmoe_eval.experiment.commands import DIRECTORY, cell_command
from capmoe_eval.experiment.composition import override
from capmoe_eval.experiment.names import BITS_PER_BYTE, gamma_column, gamma_suffix
from capmoe_eval.experiment.packs import file_with
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import LAYOUTS
from capmoe_eval.report.site import page
from capmoe_eval.report.site.blocks import (
    Block,
    Code,
    DataCell,
    DataRow,
    DataTable,
    Filter,
    Filters,
    Notice,
    Pairs,
    Prose,
    Section,
    badge,
    element,
    head,
    joined,
    link,
    number,
    numbers,
)
from capmoe_eval.report.site.inventory import Brief, Inventory, attempt
from capmoe_eval.report.site.layers import layers_table
from capmoe_eval.report.site.page import (
    Address,
    gamma_filter,
    gamma_order,
    method_filter,
    method_name,
    name_filter,
)
from capmoe_eval.report.templates import ABSENT, shown, text

if TYPE_CHECKING:
    from capmoe_eval.experiment.record_part import Proofs

_AGAIN: Final = "again"
LISTED: Final = 5_000
"""The most records that one page lists; of more, each model and task has a page."""

SHOWN: Final = 20
"""The number of other seeds that a page links to; n pages that list all n would have n² links."""


@dataclasses.dataclass(frozen=True)
class Relatives:
    """The records that a record is compared with."""

    # The same model's on the same task in the same batches; None for a baseline itself.
    baseline: Record | None
    nearest: Sequence[Record]  # of the next seeds, at most SHOWN, in their order
    seeds: int  # number of all, this record's included
    mean: float  # their score


_CAPTION: Final = (
    "One row for each evaluation. Peak: the highest load of an expert over the mean load in any "
    "layer and batch, as the router asked for and as it was computed. Examined: the share of the "
    "forwards under the method that a check independent of the decision looked at, where the "
    "record says it."
)
_PARTS: Final = (
    "One row for each model and task, of which there are too many evaluations for one page"
)
_COLUMNS: Final = (
    *("Model", "Task", "Method", "γ", "Knobs", "Score (%)", "±", "n", "Invariants"),
    *("Examined (%)", "Dropped (%)", "Peak before", "Peak after"),
)


def records_page(inventory: Inventory, address: Address) -> str:
    """Return the page that lists every record or every list, and every file that is none."""
    lead = "is no whole record and", "are no whole records and"
    blocks = page.left_out(inventory.broken, *lead)
    parts = lists(inventory.records)
    if not parts:
        blocks += _listing(inventory.records, address)
        return page.render_page(address, "Records", inventory.profile, blocks)
    rows = []
    for path, records in parts.items():
        model, task, count = records[0].model, records[0].task, len(records)
        broken = sum(bool(record.broken) for record in records)
        counts = numbers(float(count), float(broken), pattern="{:,.0f}")
        cells = [head(model), DataCell(link(address.to(path), task)), *counts]
        rows.append(DataRow(cells, {"model": model, "task": task}))
    headings = ("Model", "Task", "Records", "Failed invariants")
    blocks += [Filters(_choices(inventory.records)[:2]), DataTable(_PARTS, headings, [rows])]
    return page.render_page(address, "Records", inventory.profile, blocks)


def lists(records: Sequence[Brief]) -> dict[str, list[Brief]]:
    """Return the lists of each model and task by the path of their pages; none of a few records."""
    parts: dict[str, list[Brief]] = {}
    if len(records) > LISTED:
        for record in records:
            parts.setdefault(page.list_path(record), []).append(record)
    return parts


def list_page(records: Sequence[Brief], profile: str, address: Address) -> str:
    """Return the page that lists the records of a model and a task."""
    title = f"Records of {records[0].model} on {records[0].task}"
    return page.render_page(address, title, profile, _listing(records, address))


def _listing(records: Sequence[Brief], address: Address) -> list[Block]:
    if not records:
        return [Prose("There are no records of this profile.")]
    rows = [_row(record, address) for record in records]
    table = DataTable(_CAPTION, _COLUMNS, [rows], "lines")
    return [Filters(_choices(records), keeps_baselines=True), table]


def _choices(records: Sequence[Brief]) -> list[Filter]:
    return [
        name_filter("model", "Model", (record.model for record in records)),
        name_filter("task", "Task", (record.task for record in records)),
        method_filter(record.method for record in records),
        gamma_filter(gamma_column(record.method, record.factor) for record in records),
    ]


def _row(record: Brief, address: Address) -> DataRow:
    gamma = gamma_column(record.method, record.factor)
    written = None if record.factor is None else record.factor.label
    knobs = record.label.removeprefix(record.method).split("-")[1:]
    failed = element("span", f"failed: {', '.join(record.broken)}", class_="wrong")
    cells = [
        head(record.model),
        DataCell(record.task),
        DataCell(link(address.to_record(record), method_name(record.method))),
        number(gamma, gamma_order(gamma)),
        DataCell(" ".join(knob for knob in knobs if knob != written)),
        *numbers(record.value, record.stderr, pattern="{:.1f}", scale=100),
        number(str(record.n), float(record.n)),
        DataCell(failed if record.broken else "passed"),
        *numbers(record.examined, record.drop_rate, pattern="{:.1f}", scale=100),
        *numbers(record.peak_before, record.peak_after, pattern="{:.2f}"),
    ]
    data = {"model": record.model, "task": record.task, "method": record.method, "gamma": gamma}
    return DataRow(cells, data)


def relatives(records: Sequence[Record]) -> dict[Path, Relatives]:
    """Return the relatives of each record, by its path."""
    baselines = {_home(record): record for record in records if record.cell.method.is_stock}
    groups: defaultdict[object, list[Record]] = defaultdict(list)
    for record in records:
        knobs = tuple(record.knobs.items())
        groups[(*_home(record), record.method, record.factor, repr(knobs))].append(record)
    related = {}
    for group in groups.values():
        group.sort(key=lambda record: (record.seed or 0, record.cell.digest))
        mean = statistics.fmean(record.value for record in group)
        for rank, record in enumerate(group):
            first = max(0, min(rank - SHOWN // 2, len(group) - SHOWN - 1))
            nearest = [r for r in group[first : first + SHOWN + 1] if r is not record]
            baseline = None if record.cell.method.is_stock else baselines.get(_home(record))
            related[record.path] = Relatives(baseline, nearest, len(group), mean)
    return related


def _home(record: Record) -> tuple[object, ...]:
    """Return all of a record's cell but its method."""
    return tuple(getattr(record.cell, name) for name in ("model", "task", *CELL_FIELDS))


_LOAD: Final = {
    "Effective γ: capacity over the mean load": ("effective_gamma", "{:.3f}"),
    "Mean load: tokens per expert or device of a rank": ("mean_load", "{:.2f}"),
    "Dropped share of all assignments": ("drop_rate", "{:.2f}\u00a0%"),
    "Empty share of all slots": ("pad_waste", "{:.2f}\u00a0%"),
    "Peak load over the mean, as the router asked": ("peak_before", "{:.2f}"),
    "Peak load over the mean, as it was computed": ("peak_after", "{:.2f}"),
    "Peak before, mean over layers and batches": ("mean_peak_before", "{:.2f}"),
    "Peak after, mean over layers and batches": ("mean_peak_after", "{:.2f}"),
    "Tokens, of one layer": ("tokens", "{:,.0f}"),
    "Dropped assignments, all layers": ("dropped", "{:,.0f}"),
    "Assignments beyond a token's own top-k": ("added", "{:,.0f}"),
    "Tokens without any expert, summed over layers": ("lost_all", "{:,.0f}"),
    "Forwards under the method": ("forwards", "{:,.0f}"),
    "Decode steps without a capacity": ("decode_forwards", "{:,.0f}"),
}
_PERCENT: Final = ("{:.2f} %", "{:.2f} points", 100)
_UNITS: Final = {BITS_PER_BYTE: ("{:.4f} bits per byte", "{:.4f} bits per byte", 1)}
"""How a score and a difference of scores are shown, by metric, and what scales both."""
_METRICS: Final[dict[str, dict[str, float]]] = defaultdict(dict)
"""The metrics of tables that are not their task's own, and what scales them, by task."""
for _layout in LAYOUTS:
    for _column in _layout.tasks:
        if _column.metric:
            _METRICS[_column.task][_column.metric] = _layout.scale
_INVARIANTS: Final = ("Invariant", "State", "What it says", "Checked", "Examined", "Counted")
_EXAMINED: Final = (
    "Examined: forwards under the method that a check independent of the decision looked at; "
    "records from before it do not say."
)


def record_page(record: Record, profile: str, others: Relatives, address: Address) -> str:
    """Return a record's page."""
    gamma = gamma_suffix(record.factor, ", γ = ")
    knobs = record.knobs if record.seed is None else {**record.knobs, "seed": record.seed}
    words = ", ".join(override(knob, value) for knob, value in knobs.items())
    load = [
        (name, shown(getattr(record.load, key), pattern, 100 if "%" in pattern else 1))
        for name, (key, pattern) in _LOAD.items()
    ]
    load += _modalities(record)
    invariants = DataTable(
        "Invariants", _INVARIANTS, [[*_proofs(record.proofs)]], is_sortable=False
    )
    identity, provenance = record.cell.identity(), record.capmoe["provenance"]
    file = link(address.to_file(file_with(record.path)), record.path.as_posix())
    blocks = [
        Section("Result", [Pairs(_result(record, others, address))]),
        Section("Compute it again", _again(record)),
        Section("Load", [Pairs(load)]),
        Section("Layers", [layers_table(record)]),
        Section("Invariants", [Prose(_EXAMINED), invariants]),
        Section("Cell", [Code("\n".join(_lines(identity)), is_file=True)]),
        Section("Provenance", [Code("\n".join(_lines(provenance)), is_file=True)]),
        Section("Record", [Prose(file)]),
    ]
    title = f"{record.model} on {record.task}: {method_name(record.method)}{gamma}"
    return page.render_page(address, title, profile, [*([Prose(words)] if words else []), *blocks])


def _result(record: Record, others: Relatives, address: Address) -> Iterator[tuple[str, str]]:
    pattern, gap_pattern, scale = _UNITS.get(record.cell.task.metric, _PERCENT)

    def score(other: Record, name: str = "") -> Markup:
        value = shown(other.value, pattern, scale)
        to_other = link(address.to(page.cell_path(other)), name or value)
        return joined([to_other, value], " ") if name else to_other

    value = shown(record.value, pattern, scale)
    yield f"Score ({record.cell.task.metric})", element("strong", value)
    yield from _other_metrics(record)
    yield "Standard error", shown(record.stderr, f"± {gap_pattern}, over documents", scale)
    yield "Documents", f"{record.n:,}"
    if others.baseline:
        signed = gap_pattern.replace("{:", "{:+")
        gap = shown(record.value - others.baseline.value, signed, scale)
        yield "Baseline", joined([score(others.baseline), f"; this is {gap} to it"], "")
    if others.nearest:
        seeds = joined(score(other, f"seed {other.seed}") for other in others.nearest)
        if more := others.seeds - 1 - len(others.nearest):
            mean = f"mean of all {others.seeds:,}: {pattern.format(scale * others.mean)}"
            seeds = joined([seeds, f"and {more:,} more; {mean}"])
        yield "Other seeds", seeds


def _other_metrics(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the metrics beside the task's own that tables show, where the record has them."""
    for metric, scale in _METRICS.get(record.task, {}).items():
        score = attempt(functools.partial(record.score, metric))
        if not isinstance(score, str):
            pattern = "{:.2f} %" if scale == 100 else "{:.2f}"
            yield f"Score ({metric})", shown(score.value, pattern, scale)


def _modalities(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the tokens of each modality, where forwards had images."""
    parts = record.load.modalities or {}
    total = sum(part.tokens for part in parts.values())
    for name, part in parts.items():
        each, share = f"{part.tokens / record.n:.1f} for each document", 100 * part.tokens / total
        yield f"Tokens of {name}, of one layer", f"{part.tokens:,}: {each}, {share:.1f} %"


def _again(record: Record) -> list[Block]:
    command = cell_command(record.cell, _AGAIN)
    if command is None:
        reason = "the cell cannot be named on its command line."
        return [Notice(f"This version has no task {record.task!r}: {reason}")]
    words = f"It writes to {_AGAIN}/ and leaves the record of this page as it is."
    if DIRECTORY in command:
        words += f" {DIRECTORY} is where the evaluation sets lie; a record does not say where."
    return [Code(command, look="command"), Prose(words)]


_STATES: Final = {True: "passed", False: "failed", None: "not checked"}


def _proofs(proofs: Proofs) -> Iterator[DataRow]:
    """Yield the state of each invariant, and how often it was checked."""
    for name, proof, meaning in proofs.given():
        counts = dict(proof.model_extra or {})
        checked = counts.pop("checked", None)
        state, examined = badge(_STATES[proof.passed]), ABSENT
        if proof.passed is None:
            state += Markup("<br>") + element("small", proof.why or "does not apply")
        if proof.examined:
            share = shown(proof.examined.share, "{:.1f}\u00a0%", 100)
            words = "" if proof.examined.share is None else f" ({share})"
            forwards = f"{proof.examined.forwards:,} of {proof.examined.of:,} forwards"
            examined = f"{forwards}{words}, {proof.examined.buckets:,} buckets"
        count = shown(checked if isinstance(checked, int) else None, "{:,.0f}")
        counted = ", ".join(f"{key} {text(n)}" for key, n in sorted(counts.items()))
        cells = [DataCell(state), DataCell(meaning), DataCell(count, "number")]
        yield DataRow([head(element("code", name)), *cells, *map(DataCell, (examined, counted))])


def _lines(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every value behind the names that lead to it."""
    for key, value in sorted(content.items()):
        if isinstance(value, dict) and value:
            yield from _lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {text(value)}"
