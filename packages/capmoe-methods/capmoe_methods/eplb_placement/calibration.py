"""Place experts on ranks by the tokens that choose each in the stock model, as EPLB does."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.observers import Observer
from torch import Tensor

from capmoe_methods.calibration import Calibration, Counted
from capmoe_methods.eplb_placement.packing import pack

# Shape suffixes: L layers, E routed experts, R ranks.


class ExpertLoads(Calibration):
    """The tokens that choose each expert, for ``placement=eplb``; it serves any number of ranks."""

    asked_by: ClassVar[str] = "placement=eplb"
    stem: ClassVar[str] = "loads"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_loads"}

    @classmethod
    def measured(cls, observer: Observer, layers: Counted) -> dict[str, Any]:
        """Return the number of tokens that choose each expert of every layer [E]."""
        nothing = [0] * layers[0]["n_experts"]
        loads = [{"name": of["name"], "loads": of["load_before"] or nothing} for of in layers]
        return {"layers": loads}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the experts of each rank [R, E/R], for every layer."""
        return tuple(experts_of_ranks(layer["loads"], method.ep_size) for layer in self.layers)


def experts_of_ranks(loads: Sequence[int], ranks: int) -> Tensor:
    """Return the experts of each rank [R, E/R], rising, as EPLB spreads them without copies.

    Raises:
        UsageError: If there is no load, or the experts cannot be spread evenly.
    """
    experts_per_rank(len(loads), ranks)
    if not any(loads):
        raise UsageError(
            f"{ExpertLoads.asked_by}: the calibration saw no token under the method; choose a task "
            "with such tokens, or decode=unconstrained"
        )
    expert_RN = pack(np.array([loads], dtype=np.float64), ranks)[0]
    return torch.from_numpy(expert_RN).sort(dim=1).values
