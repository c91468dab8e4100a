"""Read from records what capacities cost a model in accuracy, paired with its unlimited self."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader, record_paths
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.routing.method import DEFAULTS, Method
from capmoe_eval.serving.front import UNCHANGED, Change, Setting, speedup

_BASELINE = Side(method="baseline")


def read_records(root: Path, model: str, reader: Reader | None = None) -> tuple[Record, ...]:
    """Return the whole records of one model in a results directory.

    Raises:
        UsageError: If there is none.
    """
    paths = [(path, root) for path in record_paths(root) if path.parent.parent.name == model]
    records = (reader or Reader()).all(paths).records
    if not records:
        known = sorted({path.parent.parent.name for path in record_paths(root)})
        there = f"it has {', '.join(known)}" if known else "it has none of any model"
        raise UsageError(f"results={shown(root)}: no whole record of model {model}; {there}")
    return records


class Quality:
    """The accuracy of one model under capacities, by its records."""

    def __init__(self, records: Sequence[Record], ranks: int) -> None:
        self.records = tuple(records)
        self._ranks = ranks
        self._model = records[0].model
        self._evidence = Evidence(profile="", records=self.records)

    def change(self, method: str, gamma: float, granularity: str) -> Change | None:
        """Return the change of accuracy under a capacity, or None if no records pair.

        All seeds of ``random`` are one side, as everywhere.
        """
        return self._change(
            self._side(Method(method, gamma, ep_size=self._ranks, granularity=granularity))
        )

    def _change(self, side: Side) -> Change | None:
        effect = self._evidence.effect(side, _BASELINE)
        found = effect.comparison
        if found is None:
            return None
        return Change(
            effect=found.effect,
            low=found.low,
            high=found.high,
            documents=found.documents,
            tasks=tuple(sorted(effect.tasks[self._model])),
            drop_rate=fmean(record.load.drop_rate for record in self._found(side)),
        )

    def _side(self, method: Method) -> Side:
        identity = method.identity()
        # What has no effect is not part of an identity, and would not be found with another value.
        return Side.model_validate({"ep_size": method.ep_size} | identity)

    def _found(self, side: Side) -> list[Record]:
        tasks = self._evidence.find(side, self._model).values()
        return [record for records in tasks for record in records]

    def completed(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return settings, capacities with their change of accuracy where records have it."""
        return [
            setting
            if setting.kind != "capacity" or setting.gamma is None or setting.granularity is None
            else setting.model_copy(
                update={
                    "change": self.change(setting.method, setting.gamma, setting.granularity),
                }
            )
            for setting in settings
        ]

    def settings(self, link_share: float) -> list[Setting]:
        """Return the settings that records alone have: unchanged, and each of their capacities.

        Straggler factors are means over the layers and forwards of the records' own batches; that
        before is of the same records.

        Raises:
            UsageError: If no record has a capacity over so many ranks.
        """
        methods = {
            dataclasses.replace(record.cell.method, seed=0)
            for record in self.records
            if record.gamma
            and math.isfinite(record.gamma)  # with 0 there is nothing to speed up
            and record.cell.method.ep_size == self._ranks
        }
        found = [
            setting
            for method in sorted(methods, key=lambda method: repr(method.identity()))
            if (setting := self._setting(method, link_share)) is not None
        ]
        if not found:
            sizes = sorted({record.cell.method.ep_size for record in self.records})
            raise UsageError(
                f"ranks={self._ranks}: no record of {self._model} has a capacity over so many "
                f"ranks; they have ep_size {', '.join(map(str, sizes))}"
            )
        before = fmean(unchanged for _, unchanged in found)
        home = Setting(kind="unchanged", method=UNCHANGED, straggler=before, speedup=1.0)
        return [home, *(setting for setting, _ in found)]

    def _setting(self, method: Method, link_share: float) -> tuple[Setting, float] | None:
        """Return the setting of a method, and the straggler factor before it."""
        assert method.gamma is not None
        side = self._side(method)
        records = self._found(side)
        if not records:
            return None
        layers = [layer for record in records for layer in record.layers]
        before = fmean(layer.peak.device_before.mean for layer in layers)
        after = fmean(layer.peak.device_after.mean for layer in layers)
        drop_rate = fmean(record.load.drop_rate for record in records)
        wastes = [record.load.pad_waste for record in records if record.load.pad_waste is not None]
        named = ("method", "gamma", "granularity", "ep_size", "seed")
        others = {k: v for k, v in method.identity().items() if k not in named}
        setting = Setting(
            kind="capacity",
            method=method.name,
            gamma=method.gamma,
            granularity="device" if method.granularity == "device" else "expert",
            knobs=" ".join(f"{k}={shown(v)}" for k, v in others.items() if v != DEFAULTS[k]),
            straggler=after,
            speedup=speedup(after, before, drop_rate, link_share),
            drop_rate=drop_rate,
            pad_waste=fmean(wastes) if wastes else None,
            change=self._change(side),
        )
        return setting, before
