"""Check what OEA, XShare and SERE bound: the experts that a batch activates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from capmoe_eval.routing.decision import best_slots, bucket_loads
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof
from capmoe_eval.wrapper.observers.loads import bound_faults

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter

    from capmoe_methods.activation import BestFirst

# Shape suffixes: T counted tokens, K = top-k, E experts.


class ActivationBound(Observer):
    """Checks the bound on activated experts, and that every token keeps its k0 best experts."""

    faults: ClassVar[Mapping[str, str]] = {
        "violations": "bound_holds (bound exceeded in {} buckets)",
        "unenforced": "overload_drops ({} overloads without a drop)",
        "best_lost": "best_kept ({} tokens without one of their k0 best experts)",
    }

    def __init__(self, layers: Sequence[MoeLayer], method: BestFirst) -> None:
        super().__init__(len(layers))
        self._method = method

    def see(self, event: LayerForward) -> None:
        """Check one forward of a layer."""
        sums, n_experts = self.sums[event.number], event.layer.n_experts
        is_first_TK = best_slots(event.scores, self._method.k0)
        cell_T = torch.zeros_like(event.groups.group_T)
        first_E, first_lost = event.layer.ranks.totals(
            bucket_loads(cell_T, event.topk_TK, is_first_TK.long(), (n_experts,)),
            (is_first_TK & event.lost_TK).any(dim=1).sum(),
        )
        beyond, overloaded, fits = self._method.activation_bound(
            event.demand_E, event.kept_E, first_E, event.calibrated
        )
        sums.forwards += 1
        sums.add(
            best_fits=fits.long(),
            best_lost=first_lost * fits,
            **bound_faults(beyond, overloaded, event.dropped),
        )

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return whether every token kept its k0 best experts, where these fit the bound."""
        fits = self.count("best_fits")
        why = None if fits else "the tokens' k0 best experts never fitted the budget"
        lost = {"violations": self.count("best_lost")}
        return {"best_kept": meter.proof(lost, why, checked=self.checked, fits=fits)}
