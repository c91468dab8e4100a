"""Read from records what capacities cost a model in accuracy, paired with its unlimited self."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader, record_places
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import CONTIGUOUS, create_method

from capmoe_serve.settings import Change, ServingSetting

_BASELINE = Side(method="baseline")
# The placements of settings that records may be of, by the names that settings have for them.
_PLACEMENTS: Final = {None: CONTIGUOUS, "EPLB": "eplb"}


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
        self._ranks = ranks
        self._model = records[0].model
        self._evidence = Evidence(profile="", results=results_of(records))

    def change(self, method: Method) -> Change | None:
        """Return the change of accuracy under a method, or None if no records pair.

        All seeds of ``random`` are one side, as everywhere. Records of a capacity of devices are
        of the placement that is asked for, and of no other.
        """
        # What has no effect is not part of an identity, and would not be found with another value.
        side = Side.model_validate({"ep_size": method.ep_size} | method.identity())
        effect = self._evidence.effect(side, _BASELINE)
        if effect.points is None:
            return None
        low, high = effect.interval()
        return Change(
            effect=effect.points,
            low=low,
            high=high,
            documents=effect.documents,
            tasks=tuple(sorted(effect.tasks[self._model])),
            drop_rate=float(self._evidence.pick(side, self._model)["drop_rate"].mean()),
        )

    def completed(self, setting: ServingSetting) -> ServingSetting:
        """Return a setting of a trace with its change of accuracy where records have it.

        A record's capacity of each expert drops the same on every placement, that of a device does
        not: it is of the record's own placement, contiguous or EPLB's without copies, which its own
        calibration planned. No record has copies, or the γ of each layer that a trace chose.
        """
        placement = _PLACEMENTS.get(setting.placement)
        if setting.granularity == "expert":
            placement = CONTIGUOUS
        if setting.kind != "capacity" or setting.gamma is None or placement is None:
            return setting
        of = {"granularity": setting.granularity, "placement": placement}
        method = create_method(setting.method, setting.gamma, ep_size=self._ranks, **of)
        return setting.model_copy(update={"change": self.change(method)})
