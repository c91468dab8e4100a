"""Check that every router computes what its recipe says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capmoe_eval.routing.decision import moved
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof
from capmoe_eval.wrapper.observers.loads import finite
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter


class GateCheck(Observer):
    """Compares the weights and the top-k of every router with its recipe."""

    is_sampled = True  # a gate's recipe does not change

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        super().__init__(len(layers))
        self._ranks = layers[0].ranks
        # The largest faults of each layer's gate in any forward, see Gate.faults.
        nothing = torch.zeros(3, dtype=torch.float32, device="cpu")
        self._worst = dict.fromkeys(range(len(layers)), nothing)

    def see(self, event: LayerForward) -> None:
        """Check one forward of a layer."""
        weight_TK = event.groups.counted(event.weight_NK)
        faults = event.layer.gate.faults(event.scores, weight_TK, event.slack)
        self.sums[event.number].forwards += 1
        worst = moved(self._worst[event.number], faults.device)
        self._worst[event.number] = torch.maximum(worst, faults)

    def end(self, plan: ForwardPlan) -> None:
        """Share the largest faults between all processes, so that all of them raise."""
        if plan.constrained and self._ranks is not ALONE:
            faults = self._ranks.highest(torch.stack([*self._worst.values()]))
            self._worst = dict(enumerate(faults))

    def broken(self) -> list[Tensor]:
        """Return for each layer whether its gate was misread."""
        return [((faults[1] > 1) | (faults[2] > 0)).long() for faults in self._worst.values()]

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer's gate in words."""
        _, off, misread = self._worst[number].tolist()
        parts = []
        if off > 1:
            times = f"weights off by {off:.1e} times what rounding explains"
            parts.append(f"gate_as_read ({times if off < math.inf else 'weights are NaN'})")
        if misread:
            parts.append(f"gate_as_read (the top-k of {misread:.0f} tokens is another)")
        return parts

    def layer(self, number: int) -> dict[str, Any]:
        """Return the largest deviation of a layer's weights from its recipe."""
        return {"weight_deviation": finite(float(self._worst[number][0]))}

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return whether every gate computed what its recipe says."""
        violations = sum(map(int, self.broken()))
        return {"gate_as_read": meter.proof({"violations": violations}, checked=self.checked)}
