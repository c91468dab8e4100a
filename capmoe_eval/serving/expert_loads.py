"""The calibration of ``placement=eplb``: how many tokens choose each expert.

It is measured once, and serves any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record_part import Calibrated, Count, Part
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.knobs import EPLB
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.calibration import Applied, Calibration
from capmoe_eval.serving.expert_modalities import ModalityCounter
from capmoe_eval.serving.placement.eplb import plan_eplb
from capmoe_eval.wrapper.layers import MoeLayer


class LayerLoads(Part):
    """The number of tokens that choose each expert of a layer [E]."""

    name: str
    loads: Annotated[list[Count], Field(min_length=1)]


class ExpertLoads(Calibration):
    """The file of the experts' loads."""

    asked_by: ClassVar[str] = f"placement={EPLB}"
    knobs: ClassVar[tuple[str, ...]] = ("count_padding", "decode")
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_loads"}

    layers: Annotated[list[LayerLoads], Field(min_length=1)]

    @classmethod
    def stem(cls, method: Method) -> str:
        """Return the name of this kind: its files depend on no ranks."""
        return "loads"

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> ModalityCounter:
        """Return a counter of choices."""
        return ModalityCounter(layers)

    @classmethod
    def measured(cls, observer: ModalityCounter) -> dict[str, Any]:
        """Return the loads of every layer."""
        counted = zip(observer.layers, observer.loads(), strict=True)
        return {"layers": [LayerLoads(name=of.name, loads=load.tolist()) for of, load in counted]}

    def applied(self, method: Method, file: str) -> Applied:
        """Return the method with the experts of each rank, for every layer."""
        placed = tuple(experts_of_ranks(layer.loads, method.ep_size) for layer in self.layers)
        return Applied(method, Calibrated(file=file, checksum=self.checksum), placed)


def experts_of_ranks(loads: Sequence[int], ranks: int) -> Tensor:
    """Return the experts of each rank [R, E/R], rising, as EPLB spreads them without copies.

    Raises:
        UsageError: If there is no load, or the experts cannot be spread evenly.
    """
    local = experts_per_rank(len(loads), ranks)
    if not any(loads):
        raise UsageError(
            f"{ExpertLoads.asked_by}: the calibration saw no token under the method; choose a task "
            "with such tokens, or decode=unconstrained"
        )
    placement = plan_eplb([loads], ranks, local)
    return torch.from_numpy(placement.expert_LRN[0]).sort(dim=1).values
