"""Count forwards, check that those under the method are the right ones, and count their tokens."""

from __future__ import annotations

from typing import Any

import torch

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.observers.observer import Observer, Proof, Tally
from capmoe_eval.wrapper.plan import ForwardPlan, ForwardStart


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
        """Return that it asks for no layer."""
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
