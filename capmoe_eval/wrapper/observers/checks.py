"""Check which forwards are under the method, that their tokens count, and every router's gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.tokens import moved
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof, Tally
from capmoe_eval.wrapper.observers.loads import finite
from capmoe_eval.wrapper.plan import ForwardPlan, ForwardStart
from capmoe_eval.wrapper.ranks import ALONE


class ForwardCheck(Observer):
    """Counts every forward, and compares the plan with the definition."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.forwards = 0  # of the model so far
        self.constrained = 0  # those under the method
        self.decode_forwards = 0  # those that were decode steps
        self.misplanned = 0  # those under it that should not be, or the other way round
        self.uncounted = 0  # those in which no token counted, though one is real
        self.all_pads = 0  # those in which no token counted, since none is real

    def begin(self, plan: ForwardPlan) -> None:
        """Count a forward, and whether any of its tokens counts."""
        start = plan.start
        assert start is not None
        self.forwards += 1
        self.constrained += plan.constrained
        self.decode_forwards += plan.decode
        self.misplanned += plan.constrained != is_under_method(self._method.decode, start)
        if plan.constrained and not plan.groups.n_tokens:
            real = torch.ones((), device=plan.counted_BS.device)
            if start.mask_BM is not None:
                real = start.mask_BM.sum()
            is_uncounted = int(plan.ranks.total(real)) > 0
            self.uncounted += is_uncounted
            self.all_pads += not is_uncounted

    def wants(self, plan: ForwardPlan) -> bool:
        """Return False: this observer reads no layer."""
        return False

    def end(self, plan: ForwardPlan) -> None:
        """Check all forwards so far.

        Raises:
            EnforcementError: If one had another plan than by the definition, or counted no token.
        """
        if self.misplanned:
            raise EnforcementError(
                f"capacity not enforced: forwards_planned ({self.misplanned} forwards are under "
                "the method that should not be, or the other way round)"
            )
        if self.uncounted:
            raise EnforcementError(
                "capacity not enforced: tokens_counted (no token of a forward counted, though its "
                "mask says that some are real)"
            )

    def summary(self) -> dict[str, Any]:
        """Return the numbers of forwards."""
        return {"forwards": self.forwards, "decode_forwards": self.decode_forwards}

    def proofs(self, tally: Tally) -> dict[str, Proof]:
        """Return whether the right forwards were under the method, and whether tokens counted."""
        return {
            "forwards_planned": {
                "passed": not self.misplanned if self.forwards else None,
                **({} if self.forwards else {"why": "there was no forward"}),
                "violations": self.misplanned,
                "checked": self.forwards,
            },
            "tokens_counted": tally.proof(
                {"uncounted": self.uncounted}, checked=self.constrained, all_pads=self.all_pads
            ),
        }


def is_under_method(decode: str, start: ForwardStart) -> bool:
    """Return whether a forward is under the method, by its knob ``decode``.

    In a generation every forward after the prompt's is a decode step, elsewhere one of one new
    token per sequence behind a filled cache.
    """
    is_decode_step = start.n_new == 1 and start.n_cached > 0
    if start.is_prompt is not None:
        is_decode_step = not start.is_prompt
    if decode == "constrained":
        return True
    return is_decode_step if decode == "only" else not is_decode_step


class LayerGate:
    """The largest faults of one layer's gate in any forward."""

    def __init__(self) -> None:
        self.forwards = 0
        self.faults = torch.zeros(3, dtype=torch.float32, device="cpu")  # see Gate.faults

    def is_off(self) -> Tensor:
        """Return whether some forward had weights or choices that are not the recipe's []."""
        return ((self.faults[1] > 1) | (self.faults[2] > 0)).long()


class GateCheck(Observer):
    """Compares the weights and the top-k of every router with its recipe."""

    is_sampled = True  # a gate's recipe does not change
    sums: Sequence[LayerGate]

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        self.sums = [LayerGate() for _ in layers]
        self._ranks = layers[0].ranks

    def see(self, event: LayerForward) -> None:
        """Check one forward of a layer."""
        gate = self.sums[event.number]
        weight_TK = event.counts.groups.counted(event.router.weight_NK)
        faults = event.layer.gate.faults(event.scores, weight_TK, event.router.slack)
        gate.forwards += 1
        gate.faults = torch.maximum(moved(gate.faults, faults.device), faults)

    def end(self, plan: ForwardPlan) -> None:
        """Share the largest faults between all processes, so that all of them raise."""
        if plan.constrained and self._ranks is not ALONE:
            faults = torch.stack([gate.faults for gate in self.sums])
            for gate, worst in zip(self.sums, self._ranks.highest(faults), strict=True):
                gate.faults = worst

    def broken(self) -> list[Tensor]:
        """Return for each layer whether its gate was misread."""
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
        """Return whether every gate computed what its recipe says."""
        violations = sum(int(gate.is_off()) for gate in self.sums)
        checked = sum(gate.forwards for gate in self.sums)
        return {"gate_as_read": tally.proof({"violations": violations}, checked=checked)}
