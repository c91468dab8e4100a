"""Check which forwards are under the method, that their tokens count, and every router's gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.tokens import moved
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof
from capmoe_eval.wrapper.observers.loads import finite
from capmoe_eval.wrapper.plan import ForwardPlan, ForwardStart
from capmoe_eval.wrapper.ranks import ALONE

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter


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

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return whether the right forwards were under the method, and whether tokens counted."""
        return {
            "forwards_planned": {
                "passed": not self.misplanned if self.forwards else None,
                **({} if self.forwards else {"why": "there was no forward"}),
                "violations": self.misplanned,
                "checked": self.forwards,
            },
            "tokens_counted": meter.proof(
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
