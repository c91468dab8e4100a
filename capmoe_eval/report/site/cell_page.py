"""The page of one record: what came out, under which load, and how to get it again."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capmoe_eval.experiment.commands import DIRECTORY, cell_command
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Layer
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.loose import shown, text
from capmoe_eval.report.site.names import method_name
from capmoe_eval.report.site.page import Address, Frame
from capmoe_eval.report.templates import render

_AGAIN: Final = "again"

_LOAD: Final = (
    ("drop_rate", "Dropped share of all assignments", "{:.2f}\u00a0%", 100.0),
    ("pad_waste", "Empty share of all slots", "{:.2f}\u00a0%", 100.0),
    ("peak_before", "Peak load over the mean, as the router asked", "{:.2f}", 1.0),
    ("peak_after", "Peak load over the mean, as it was computed", "{:.2f}", 1.0),
    ("mean_peak_before", "Peak before, mean over layers and batches", "{:.2f}", 1.0),
    ("mean_peak_after", "Peak after, mean over layers and batches", "{:.2f}", 1.0),
    ("tokens", "Tokens, of one layer", "{:,.0f}", 1.0),
    ("dropped", "Dropped assignments, all layers", "{:,.0f}", 1.0),
    ("added", "Assignments beyond a token's own top-k", "{:,.0f}", 1.0),
    ("lost_all", "Tokens without any expert, summed over layers", "{:,.0f}", 1.0),
    ("forwards", "Forwards under the method", "{:,.0f}", 1.0),
    ("decode_forwards", "Decode steps without a capacity", "{:,.0f}", 1.0),
)
SHOWN: Final = 20
"""How many other seeds a page links to; a page of each of n seeds that lists all is n² links."""
_STATES: Final = {True: "kept", False: "broken", None: "does not apply"}


@dataclass(frozen=True)
class Others:
    """The records that are the same but for the seed.

    Attributes:
        nearest: Those whose seeds come next, at most :data:`SHOWN`, in the order of seeds.
        count: How many there are.
        mean: Mean score of all seeds, this record's included.
    """

    nearest: Sequence[Record]
    count: int
    mean: float


class Relatives:
    """Finds the records that are the same but for the seed, and a record's baseline.

    Args:
        records: All records.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._seeds: defaultdict[str, list[Record]] = defaultdict(list)
        self._baselines: dict[str, Record] = {}
        self._rank: dict[Path, int] = {}
        self._mean: dict[str, float] = {}
        # An identity takes long to say, and every record's is asked for again.
        self._keys = {r.path: (_key(r, "seed"), _key(r)) for r in records}
        for record in records:
            seedless, home = self._keys[record.path]
            self._seeds[seedless].append(record)
            if record.method == "baseline":
                self._baselines[home] = record
        for seedless, found in self._seeds.items():
            found.sort(key=lambda record: (record.seed or 0, record.cell.digest))
            self._rank.update({record.path: rank for rank, record in enumerate(found)})
            self._mean[seedless] = statistics.fmean(record.value for record in found)

    def seeds(self, record: Record) -> Others:
        """Return the records of the other seeds."""
        seedless = self._keys[record.path][0]
        found, rank = self._seeds[seedless], self._rank[record.path]
        first = max(0, min(rank - SHOWN // 2, len(found) - SHOWN - 1))
        window = found[first : first + SHOWN + 1]
        nearest = [other for other in window if other is not record]
        return Others(nearest, len(found) - 1, self._mean[seedless])

    def baseline(self, record: Record) -> Record | None:
        """Return the same model's baseline on the same task, in the same batches."""
        return (
            None if record.method == "baseline" else self._baselines.get(self._keys[record.path][1])
        )


def _key(record: Record, *leave_out: str) -> str:
    """Return a record's identity without its method, or without some of its knobs."""
    identity = record.cell.identity()
    if leave_out:
        knobs = identity["method"].items()
        identity["method"] = {knob: value for knob, value in knobs if knob not in leave_out}
    else:
        del identity["method"]
    return json.dumps(identity, sort_keys=True)


def record_page(
    record: Record,
    inventory: Inventory,
    relatives: Relatives,
    address: Address,
) -> str:
    """Return a record's page."""
    gamma = gamma_text(record.method, record.gamma)
    named = f"{method_name(record.method)}, γ = {gamma}"
    if record.gamma is None:
        named = method_name(record.method)
    knobs = ", ".join(f"{knob}={_word(value)}" for knob, value in record.knobs.items())
    if record.seed is not None:
        knobs += f", seed={record.seed}"
    others = relatives.seeds(record)
    return render(
        "cell",
        frame=Frame(address, f"{record.model} on {record.task}: {named}", inventory.profile),
        knobs=knobs,
        metric=record.cell.task.metric,
        score=_percent(record.value),
        stderr=shown(record.stderr, "± {:.2f} points, over documents", 100),
        documents=f"{record.n:,}",
        baseline=_baseline(record, relatives, address),
        seeds=[_seed(other, address) for other in others.nearest],
        more_seeds=_more_seeds(others),
        command=cell_command(record.cell, _AGAIN),
        again=_AGAIN,
        directory=DIRECTORY,
        task=repr(record.task),
        load=[
            (name, shown(getattr(record.load, key), pattern, scale))
            for key, name, pattern, scale in _LOAD
        ],
        layers=[_layer(layer) for layer in record.layers],
        proofs=_proofs(record),
        identity=_flat(record.cell.identity()),
        provenance=_flat(record.capmoe["provenance"]),
        file=address.link_to_file(record.path, record.path.as_posix()),
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _baseline(record: Record, relatives: Relatives, address: Address) -> dict[str, str] | None:
    """Return the link to a record's baseline, and how far the record is from it."""
    baseline = relatives.baseline(record)
    if baseline is None:
        return None
    link = address.link(page.cell_path(baseline), _percent(baseline.value))
    return {**link, "moved": shown(record.value - baseline.value, "{:+.2f}", 100)}


def _seed(other: Record, address: Address) -> dict[str, str]:
    link = address.link(page.cell_path(other), f"seed {other.seed}")
    return {**link, "score": _percent(other.value)}


def _more_seeds(others: Others) -> str:
    """Return the number of seeds that are not linked to, with the mean of all, or nothing."""
    more = others.count - len(others.nearest)
    mean = f"mean of all {others.count + 1:,}: {_percent(others.mean)}"
    return f"{more:,} more; {mean}" if more else ""


def _layer(layer: Layer) -> dict[str, object]:
    numbers = (
        (layer.drop_rate, "{:.1f}", 100.0),
        (layer.pad_waste, "{:.1f}", 100.0),
        (layer.peak.expert_before.mean, "{:.2f}", 1.0),
        (layer.peak.expert_after.mean, "{:.2f}", 1.0),
    )
    return {
        "name": layer.name,
        "bars": _bars(layer),
        "numbers": [(shown(value, pattern, scale), value) for value, pattern, scale in numbers],
    }


def _bars(layer: Layer) -> dict[str, object]:
    """Return the drawing of each expert's load before and after, busiest first."""
    before, after = layer.load_before, layer.load_after
    top = max((*before, *after))
    order = sorted(range(len(before)), key=lambda expert: -before[expert])
    width, height = 4 * len(before), 48
    label = f"{len(before)} experts; the busiest was asked for {before[order[0]]:,.0f} times and "
    label += f"computed {after[order[0]]:,.0f} of them"
    mean = height * (1 - sum(before) / len(before) / top)
    return {
        "box": f"0 0 {width} {height}",
        "width": min(width * 2, 384),
        "height": height,
        "label": label,
        "before": _steps([before[e] / top * height for e in order], height),
        "after": _steps([after[e] / top * height for e in order], height),
        "mean": f"M0 {mean:.1f}h{width}",
    }


def _steps(heights: Sequence[float], base: int) -> str:
    """Return the path of bars, 3 wide and 1 apart."""
    bars = (f"M{4 * i} {base}v{-h:.1f}h3v{h:.1f}z" for i, h in enumerate(heights) if h > 0)
    return "".join(bars)


def _proofs(record: Record) -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "state": _STATES[promise.passed],
            "meaning": field.description or "",
            "counted": ", ".join(
                f"{key} {text(value)}" for key, value in sorted((promise.model_extra or {}).items())
            ),
        }
        for name, field in sorted(type(record.proofs).model_fields.items())
        for promise in [getattr(record.proofs, name)]
    ]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value with the names that lead to it."""
    for key, value in sorted(content.items()):
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", text(value)
