"""Check in every forward that each router's gate computes as it was read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.tokens import moved
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.loads import finite
from capmoe_eval.wrapper.observers.observer import Observer, Proof, Tally
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE


class LayerGate:
    """The largest faults of one layer's gate in any forward."""

    def __init__(self) -> None:
        self.forwards = 0
        self.faults = torch.zeros(3)  # see Gate.faults

    def is_off(self) -> Tensor:
        """Return whether a forward showed that the router's gate works in another way []."""
        return ((self.faults[1] > 1) | (self.faults[2] > 0)).long()


class GateCheck(Observer):
    """Compares the weights and the top-k of every router with its recipe."""

    sums: Sequence[LayerGate]

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        self.sums = [LayerGate() for _ in layers]
        self._ranks = layers[0].ranks

    def see(self, event: LayerForward) -> None:
        """Check one forward of a layer."""
        gate = self.sums[event.number]
        weight_TK = event.counts.groups.counted(event.router.weight_NK)
        faults = event.layer.gate.faults(event.scores, weight_TK)
        gate.forwards += 1
        gate.faults = torch.maximum(moved(gate.faults, faults.device), faults)

    def end(self, plan: ForwardPlan) -> None:
        """Have all processes know the largest faults of any, so that all raise."""
        if plan.constrained and self._ranks is not ALONE:
            faults = torch.stack([gate.faults for gate in self.sums])
            for gate, worst in zip(self.sums, self._ranks.highest(faults), strict=True):
                gate.faults = worst

    def broken(self) -> list[Tensor]:
        """Return of each layer whether its gate was misread."""
        return [gate.is_off() for gate in self.sums]

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer's gate in words."""
        _, off, misread = self.sums[number].faults.tolist()
        parts = []
        if off > 1:
            times = f"weights off by {off:.1e} times what rounding explains"
            parts.append(f"gate_as_read ({times if off < math.inf else 'weights are NaN'})")
        if misread:
            parts.append(f"gate_as_read (the top-k of {misread:.0f} tokens is another)")
        return parts

    def layer(self, number: int) -> dict[str, Any]:
        """Return the largest deviation of a layer's weights from its recipe."""
        return {"weight_deviation": finite(float(self.sums[number].faults[0]))}

    def proofs(self, tally: Tally) -> dict[str, Proof]:
        """Return whether every gate computes as it was read."""
        violations = sum(int(gate.is_off()) for gate in self.sums)
        checked = sum(gate.forwards for gate in self.sums)
        return {"gate_as_read": tally.proof({"violations": violations}, checked=checked)}
