"""Add up decode steps alone, where they are under the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.counts import by_unit
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.loads import ACTIVATED
from capmoe_eval.wrapper.observers.observer import CountingObserver
from capmoe_eval.wrapper.plan import ForwardPlan


class DecodeSteps(CountingObserver):
    """Adds up the drops, the slots and the activated experts of decode steps."""

    def __init__(self, layers: Sequence[MoeLayer], method: Method) -> None:
        super().__init__(len(layers))
        self._method = method
        self._steps = 0
        self._live: Tensor | int = 0  # sequences that counted, summed over the steps

    def begin(self, plan: ForwardPlan) -> None:
        """Count the sequences of a decode step."""
        if self.wants(plan):
            self._steps += 1
            self._live = self._live + plan.ranks.total(plan.counted_BS.any(dim=1).sum())

    def wants(self, plan: ForwardPlan) -> bool:
        """Return whether a forward is a decode step under the method."""
        return plan.decode and plan.constrained

    def see(self, event: LayerForward) -> None:
        """Count one decode step of a layer."""
        sums, counts = self.sums[event.number], event.counts
        sums.add(
            assignments=counts.n_tokens * event.layer.top_k,
            dropped=counts.dropped,
            activated_before=(counts.demand_E > 0).sum(),
            activated_after=(counts.kept_E > 0).sum(),
        )
        if event.method.factor is not None:
            units = by_unit(counts.kept_GE, event.method, event.calibrated).shape[1]
            sums.add(slots=event.limit_G.sum() * units)

    def summary(self) -> dict[str, Any]:
        """Return the statistics of decode steps, if there were any under the method."""
        if not self._steps:
            return {}
        total = self.totals("assignments", "dropped", "slots", *ACTIVATED)
        assignments = max(total["assignments"], 1)
        effective = total["slots"] / assignments if self._method.is_capped else None
        return {
            "decode": {
                "live": int(self._live) / self._steps,
                "drop_rate": total["dropped"] / assignments,
                "effective_gamma": effective,
                **{name: total[name] / (self._steps * len(self.sums)) for name in ACTIVATED},
            }
        }
