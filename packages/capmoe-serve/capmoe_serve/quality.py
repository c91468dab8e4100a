"""Read from records what capacities cost a model in accuracy, paired with its unlimited self."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader, record_places
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import CONTIGUOUS, create_method, knobs

from capmoe_serve.pairs import KEEPERS
from capmoe_serve.settings import Change, ServingSetting, speedup

_BASELINE = Side(method="baseline")
# The placements of settings that records may be of, by the names that settings have for them.
_PLACEMENTS: Final = {None: CONTIGUOUS, "EPLB": "eplb"}
_SHARED = ("granularity", "count_padding", "decode", "renormalize")  # knobs of many methods


def read_records(root: Path, model: str) -> tuple[Record, ...]:
    """Return the whole records of one model in a results directory.

    Raises:
        UsageError: If there is none.
    """
    models: dict[str, list[tuple[Path, Path]]] = {}
    for path, directory in record_places(root):
        models.setdefault(path.parent.parent.name, []).append((path, directory))
    records = Reader().all(models.get(model, ())).records
    if not records:
        names = sorted(models)
        there = f"it has {', '.join(names)}" if names else "it has none of any model"
        raise UsageError(f"results={shown(root)}: no whole record of model {model}; {there}")
    return records


class Quality:
    """The accuracy of one model under capacities, by its records."""

    def __init__(self, records: Sequence[Record], ranks: int) -> None:
        self.records = tuple(records)
        self._ranks = ranks
        self._model = records[0].model
        self._evidence = Evidence(profile="", results=results_of(self.records))
        self._by_path = {str(record.path): record for record in self.records}

    def change(self, method: Method) -> Change | None:
        """Return the change of accuracy under a method, or None if no records pair.

        All seeds of ``random`` are one side, as everywhere. Records of a capacity of devices are
        of the placement that is asked for, and of no other.
        """
        effect = self._evidence.effect(_side(method), _BASELINE)
        if effect.points is None:
            return None
        low, high = effect.interval()
        return Change(
            effect=effect.points,
            low=low,
            high=high,
            documents=effect.documents,
            tasks=tuple(sorted(effect.tasks[self._model])),
            drop_rate=fmean(record.load.drop_rate for record in self._records_of(method)),
        )

    def _records_of(self, method: Method) -> list[Record]:
        cells = self._evidence.pick(_side(method), self._model)
        return [self._by_path[path] for path in cells["path"]]

    def completed(
        self, settings: Sequence[ServingSetting], link_share: float
    ) -> list[ServingSetting]:
        """Return settings of a trace with their change of accuracy where records have it.

        After them come the settings of records alone, whose loads no trace tells, such as Token
        Reroute's, with those of the records' own batches.

        A record's capacity of each expert drops the same on every placement, that of a device does
        not: it is of the record's own placement, contiguous or EPLB's without copies, which its own
        calibration planned. No record has copies, or the γ of each layer that a trace chose.
        """
        completed = [self._completed(setting) for setting in settings]
        titles = {setting.title for setting in completed}
        others = [
            self._recorded(method, link_share)
            for method in self._methods()
            if method.name not in KEEPERS
        ]
        return completed + [s for s in others if s is not None and s.title not in titles]

    def _completed(self, setting: ServingSetting) -> ServingSetting:
        if setting.kind == "activation":
            return self._of_prompts(setting)
        placement = _PLACEMENTS.get(setting.placement)
        if setting.granularity == "expert":
            placement = CONTIGUOUS
        if setting.kind != "capacity" or setting.gamma is None or placement is None:
            return setting
        of = {"granularity": setting.granularity, "placement": placement}
        method = create_method(setting.method, setting.gamma, ep_size=self._ranks, **of)
        return setting.model_copy(update={"change": self.change(method)})

    def _of_prompts(self, setting: ServingSetting) -> ServingSetting:
        """Return a setting of OEA with the accuracy of records that bound all forwards.

        Weights after it (``renormalize``) change no expert: the first such record is taken.
        """
        for method in self._methods():
            is_same = (
                method.name == setting.method and f"k0={method.setting('k0')}" == setting.knobs
            )
            of_all = method.decode == knobs()["decode"].default
            if is_same and of_all and (change := self.change(method)) is not None:
                return setting.model_copy(update={"change": change, "knobs": _knobs(method)})
        return setting

    def settings(self, link_share: float) -> list[ServingSetting]:
        """Return the settings that records alone have: unchanged, and each of their methods.

        Straggler factors are means over the layers and forwards of the records' own batches; that
        before is of the same records.

        Raises:
            UsageError: If no record has a capacity over so many ranks.
        """
        methods = self._methods()
        ranked = [self._records_of(method) for method in methods if method.ep_size == self._ranks]
        before = [_straggler(records, "before") for records in ranked if records]
        if not before:
            sizes = sorted({record.cell.method.ep_size for record in self.records})
            raise UsageError(
                f"ranks={self._ranks}: no record of {self._model} has a capacity over so many "
                f"ranks; they have ep_size {', '.join(map(str, sizes))}"
            )
        home = ServingSetting(
            kind="unchanged",
            method=CONTIGUOUS,
            loads="records",
            straggler=fmean(before),
            speedup=1.0,
        )
        recorded = (self._recorded(method, link_share) for method in methods)
        return [home, *(setting for setting in recorded if setting is not None)]

    def _methods(self) -> list[Method]:
        """Return the methods of the records that are of so many ranks, or of no ranks at all.

        They are of contiguous placement; loads of records tell nothing of others. Seeds are one.
        """
        methods = {_unseeded(record.cell.method) for record in self.records}
        return sorted(filter(self._is_served, methods), key=lambda method: repr(method.identity()))

    def _is_served(self, method: Method) -> bool:
        if method.is_stock or method.is_placed:
            return False
        if method.unit is None:  # the experts of a batch are chosen for all ranks together
            return method.ep_size == self._ranks or method.granularity == "expert"
        # With γ=0 there is nothing to speed up.
        gamma = method.uniform_gamma
        is_finite = bool(gamma) and gamma != math.inf
        return method.ep_size == self._ranks and is_finite

    def _recorded(self, method: Method, link_share: float) -> ServingSetting | None:
        """Return the setting of a method by its records' own batches, or None without records."""
        records = self._records_of(method)
        if not records:
            return None
        loads = [record.load for record in records]
        drop_rate = fmean(load.drop_rate for load in loads)
        wastes = [load.pad_waste for load in loads if load.pad_waste is not None]
        fields = {
            "kind": "activation" if method.unit is None else "capacity",
            "method": method.name,
            "gamma": method.uniform_gamma,
            "granularity": None if method.unit is None else method.granularity,
            "knobs": _knobs(method),
            "loads": "records",
            "drop_rate": drop_rate,
            "pad_waste": fmean(wastes) if wastes else None,
            "change": self.change(method),
        }
        for field, when in (("active", "after"), ("active_before", "before")):
            counts = [getattr(load, f"activated_{when}") for load in loads]
            if None not in counts:  # older records did not count them
                fields[field] = fmean(counts)
        if method.ep_size == self._ranks:
            before, after = (_straggler(records, when) for when in ("before", "after"))
            layers = [layer for record in records for layer in record.layers]
            added = sum(layer.added for layer in layers)
            sent = 1 - drop_rate + added / sum(layer.assignments for layer in layers)
            fields |= {"straggler": after, "speedup": speedup(after, before, sent, link_share)}
        return ServingSetting.model_validate(fields)


def _side(method: Method) -> Side:
    # What has no effect is not part of an identity, and would not be found with another value.
    return Side.model_validate({"ep_size": method.ep_size} | method.identity())


@cache  # a method has many records, and is checked when it is made
def _unseeded(method: Method) -> Method:
    """Return a method with seed 0 where it has a seed."""
    knobs = method.identity()
    return create_method(knobs.pop("method"), knobs.pop("gamma", None), **knobs | {"seed": 0})


def _straggler(records: Sequence[Record], when: Literal["before", "after"]) -> float:
    """Return the mean straggler factor of records' ranks before or after drops."""
    layers = (layer for record in records for layer in record.layers)
    return fmean(
        layer.peak["device_before" if when == "before" else "device_after"]["mean"]
        for layer in layers
    )


def _knobs(method: Method) -> str:
    """Return a method's knobs beside its capacity as words, without those at their defaults.

    What bounds the activated experts is always said.
    """
    capacity = ("method", "gamma", "ep_size", "seed", *(("granularity",) if method.unit else ()))
    others = {k: v for k, v in method.identity().items() if k not in capacity}
    named = {k: v for k, v in others.items() if method.unit is None and k not in _SHARED}
    return " ".join(
        f"{k}={shown(v)}"
        for k, v in (named | others).items()
        if k in named or v != knobs()[k].default
    )
