"""The page of all records, and the page of each: score, loads, the command to compute it again."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.experiment.cell import CELL_FIELDS
from capmoe_eval.experiment.commands import DIRECTORY, cell_command, override
from capmoe_eval.experiment.names import gamma_column, gamma_suffix, gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Brief, Inventory
from capmoe_eval.report.site.names import (
    gamma_filter,
    gamma_order,
    method_filter,
    method_name,
    name_filter,
)
from capmoe_eval.report.site.page import Address, render_page
from capmoe_eval.report.templates.texts import text

if TYPE_CHECKING:
    from capmoe_eval.experiment.record_part import Layer, Proofs

_AGAIN: Final = "again"

LISTED: Final = 5_000
"""The number of records up to which one page lists all; more have a page for each model and task.
A browser takes seconds for a table of so many rows."""

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


def records_page(inventory: Inventory, address: Address) -> str:
    """Return the page that lists every record or every list, and every file that is none."""
    parts = lists(inventory.records)
    shown = () if parts else inventory.records
    return _listing("Records", shown, inventory.profile, address, inventory.broken, parts)


def lists(records: Sequence[Brief]) -> dict[str, list[Brief]]:
    """Return the lists of each model and task by the path of their pages; none of a few records."""
    found: dict[str, list[Brief]] = {}
    if len(records) > LISTED:
        for record in records:
            found.setdefault(page.list_path(record), []).append(record)
    return found


def list_page(records: Sequence[Brief], profile: str, address: Address) -> str:
    """Return the page that lists the records of a model and a task."""
    title = f"Records of {records[0].model} on {records[0].task}"
    return _listing(title, records, profile, address)


def _listing(
    title: str,
    records: Sequence[Brief],
    profile: str,
    address: Address,
    broken: Sequence[str] = (),
    parts: Mapping[str, Sequence[Brief]] = MappingProxyType({}),
) -> str:
    every = [record for part in (records, *parts.values()) for record in part]
    return render_page(
        "records",
        address,
        title,
        profile,
        broken=broken,
        choices=[
            name_filter("model", "Model", (record.model for record in every)),
            name_filter("task", "Task", (record.task for record in every)),
            method_filter(record.method for record in records),
            gamma_filter(gamma_column(record.method, record.factor) for record in records),
        ],
        parts=[(address.to(path), part) for path, part in parts.items()],
        rows=[_row(record, address) for record in records],
    )


def _row(record: Brief, address: Address) -> dict[str, object]:
    gamma = gamma_column(record.method, record.factor)
    knobs = record.label.removeprefix(record.method).split("-")[1:]
    written = None if record.factor is None else record.factor.label
    return {
        "record": record,
        "method_name": method_name(record.method),
        "href": address.to_record(record),
        "gamma": gamma,
        "gamma_order": gamma_order(gamma),
        "knobs": " ".join(knob for knob in knobs if knob != written),
    }


def relatives(records: Sequence[Record]) -> dict[Path, Relatives]:
    """Return the relatives of each record, by its path."""
    baselines = {_home(record): record for record in records if record.cell.method.is_stock}
    groups: defaultdict[object, list[Record]] = defaultdict(list)
    for record in records:
        knobs = tuple(record.knobs.items())
        groups[(*_home(record), record.method, record.factor, repr(knobs))].append(record)
    found = {}
    for group in groups.values():
        group.sort(key=lambda record: (record.seed or 0, record.cell.digest))
        mean = statistics.fmean(record.value for record in group)
        for rank, record in enumerate(group):
            first = max(0, min(rank - SHOWN // 2, len(group) - SHOWN - 1))
            nearest = [r for r in group[first : first + SHOWN + 1] if r is not record]
            baseline = None if record.cell.method.is_stock else baselines.get(_home(record))
            found[record.path] = Relatives(baseline, nearest, len(group), mean)
    return found


def _home(record: Record) -> tuple[object, ...]:
    """Return all of a record's cell but its method."""
    cell = record.cell
    return cell.model, cell.task, *(getattr(cell, field) for field in CELL_FIELDS)


def record_page(record: Record, profile: str, others: Relatives, address: Address) -> str:
    """Return a record's page."""
    gamma = gamma_suffix(record.factor, ", γ = ")
    knobs = record.knobs if record.seed is None else {**record.knobs, "seed": record.seed}
    return render_page(
        "cell",
        address,
        f"{record.model} on {record.task}: {method_name(record.method)}{gamma}",
        profile,
        knobs=", ".join(override(knob, value) for knob, value in knobs.items()),
        record=record,
        metric=record.cell.task.metric,
        others=others,
        href=lambda other: address.to(page.cell_path(other)),
        command=cell_command(record.cell, _AGAIN),
        again=_AGAIN,
        directory=DIRECTORY,
        layers=[(layer, _bars(layer)) for layer in record.layers],
        gammas=_gammas(record),
        proofs=_proofs(record.proofs),
        identity="\n".join(_lines(record.cell.identity())),
        provenance="\n".join(_lines(record.capmoe["provenance"])),
        file=address.link_to_file(record.path, record.path.as_posix()),
    )


def _gammas(record: Record) -> list[tuple[str, float]]:
    """Return each layer's γ and its place among all; nothing where all layers have the same."""
    own = [float(layer.gamma) for layer in record.layers if layer.gamma is not None]
    return [(gamma_text(gamma), gamma_order(gamma_text(gamma))) for gamma in own]


_HEIGHT: Final = 480
"""Units from the foot of a drawing to the top of its highest bar; ten are a pixel."""


def _bars(layer: Layer) -> dict[str, object]:
    """Return the drawing of each expert's load before and after, busiest first."""
    before, after = layer.load_before, layer.load_after
    scale = _HEIGHT / max((*before, *after))
    order = sorted(range(len(before)), key=before.__getitem__, reverse=True)
    width = 4 * len(before)
    label = f"{len(before)} experts; the busiest was asked for {before[order[0]]:,.0f} times and "
    label += f"computed {after[order[0]]:,.0f} of them"
    mean = _HEIGHT - round(sum(before) / len(before) * scale)
    return {
        "box": f"0 0 {width} {_HEIGHT}",
        "width": min(width * 2, 384),
        "height": _HEIGHT // 10,
        "label": label,
        "before": _steps(len(order)) % tuple([round(-scale * before[e]) for e in order]),
        "after": _steps(len(order)) % tuple([round(-scale * after[e]) for e in order]),
        "mean": f"M0 {mean}h{width}",
    }


@functools.cache
def _steps(bars: int) -> str:
    """Return the path of bars, to be filled with their heights; a style makes them 3 wide."""
    return "".join(f"M{4 * bar + 1.5} {_HEIGHT}v%d" for bar in range(bars))


_STATES: Final = {True: "passed", False: "failed", None: "not checked"}


def _proofs(proofs: Proofs) -> Iterator[dict[str, object]]:
    """Yield what the template shows of each invariant: its state, and how often it was checked."""
    for name, proof, meaning in proofs.given():
        counts = dict(proof.model_extra or {})
        checked = counts.pop("checked", None)
        yield {
            "name": name,
            "state": _STATES[proof.passed],
            "why": "" if proof.passed is not None else proof.why or "does not apply",
            "meaning": meaning,
            "checked": checked if isinstance(checked, int) else None,
            "examined": proof.examined,
            "counted": ", ".join(f"{key} {text(n)}" for key, n in sorted(counts.items())),
        }


def _lines(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every value behind the names that lead to it."""
    for key, value in sorted(content.items()):
        if isinstance(value, dict) and value:
            yield from _lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {text(value)}"
