"""Judge placements by the loads of ranks, on other steps than they are planned on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import CONTIGUOUS
from numpy.typing import ArrayLike

from capmoe_serve.placements import Counts, SlotPlan, checked_loads, contiguous, plan_eplb

if TYPE_CHECKING:
    import pandas as pd

# Shape suffixes: S steps, L layers, E experts.


def compare(
    load_SLE: ArrayLike,
    ranks: int,
    extra_slots: Iterable[int] = (1,),
    groups: int = 1,
    nodes: int = 1,
) -> pd.DataFrame:
    """Return what every placement of :func:`placements` gives, as :func:`judge`, by its name.

    EPLB plans on the first half of the steps; all are judged on the second.

    Raises:
        UsageError: For loads that are no whole numbers of pairs, or fewer than two steps.
    """
    import pandas as pd

    load_SLE = checked_loads("load_SLE", load_SLE, "SLE", whole=True)
    if (middle := len(load_SLE) // 2) < 1:
        raise UsageError(
            "load_SLE has one step: a placement is planned on other steps than it is judged on; "
            "give at least 2"
        )
    planned = placements(load_SLE[:middle].sum(axis=0), ranks, extra_slots, groups, nodes)
    rows = {name: judge(load_SLE[middle:], placement) for name, placement in planned.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("placement")


def placements(
    load_LE: Counts,
    ranks: int,
    extra_slots: Iterable[int] = (1,),
    groups: int = 1,
    nodes: int = 1,
) -> dict[str, SlotPlan]:
    """Return contiguous placement and those of EPLB for summed loads, by their names.

    EPLB has the fewest slots that hold all experts, and so many more on every rank; ``groups`` and
    ``nodes`` are those of :func:`plan_eplb`. Where R does not divide E, all have copies.
    """
    layers, n_experts = load_LE.shape
    plans = {CONTIGUOUS: contiguous(layers, n_experts, ranks)}
    for extra in (0, *extra_slots):
        placement = plan_eplb(load_LE, ranks, plans[CONTIGUOUS].slots + extra, groups, nodes)
        plans[f"EPLB+{placement.redundant}" if placement.redundant else "EPLB"] = placement
    return plans


def judge(
    load_SLE: Counts, placement: SlotPlan, asked_SLE: Counts | None = None
) -> dict[str, float]:
    """Return what a placement gives on loads, which must not be those it was planned on.

    - ``straggler``: load of the fullest rank over the mean rank load before any drop, the mean over
      the steps and layers that have a pair: as ``peak.device_after`` of a record's layers
    - ``worst``: the highest of them
    - ``extra``: copies of experts in a layer
    - ``drop_rate``: share of the pairs that no rank computes; ``asked_SLE`` are the loads before a
      capacity came first
    """
    asked_SL = (load_SLE if asked_SLE is None else asked_SLE).sum(axis=2)
    fullest_SL = np.stack(
        [
            placement.rank_load(load_SLE[:, layer], layer).max(axis=1)
            for layer in range(load_SLE.shape[1])
        ],
        axis=1,
    )
    straggler_SL = fullest_SL * placement.ranks / np.where(asked_SL, asked_SL, np.nan)
    return {
        "straggler": float(np.nanmean(straggler_SL)),
        "worst": float(np.nanmax(straggler_SL)),
        "extra": float(placement.redundant),
        "drop_rate": 1 - float(load_SLE.sum()) / max(int(asked_SL.sum()), 1),
    }
