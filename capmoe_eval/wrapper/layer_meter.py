"""Count the load of one layer from the indices that its experts are called with."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.activation import best_own
from capmoe_eval.routing.assign import idle_experts
from capmoe_eval.routing.groups import moved
from capmoe_eval.routing.homes import by_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores, bucket_loads
from capmoe_eval.routing.weighted import Weighted
from capmoe_eval.wrapper.bounds import check_activation, check_pairs, check_weights, slots_of_pads
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.modality_meter import (
    DIGITS,
    by_band,
    by_modality,
    check_order,
    modality_report,
    summary,
)
from capmoe_eval.wrapper.plan import GAMMA_GRID, ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: N rows of the batch, T counted tokens, K = top-k, S slots, E experts, G groups,
# U bounded units (experts, or devices), X capacity factors of the grid, R ranks, M modalities.

SCALARS = (
    "tokens",  # counted tokens T, summed over forwards
    "assignments",  # T·K
    "dropped",  # pairs of a token's own top-k that were not computed
    "added",  # computed pairs beyond a token's own top-k
    "lost_all",  # tokens none of whose pairs was computed
    "buckets",  # groups with a token, times bounded units
    "slots",  # C summed over groups and bounded units
    "unused_slots",  # of them, left empty
    "violations",  # buckets with more pairs than their bound
    "pad_slots",  # computed pairs of tokens that do not count
    "unenforced",  # forwards with an overloaded bucket in which nothing was dropped
    "overloaded",  # forwards with an overloaded bucket
)
ACTIVATED = ("activated_before", "activated_after")
"""Experts that some token chose, and experts that some token was sent to, summed over forwards."""
DECODED = ("assignments", "dropped", "slots", *ACTIVATED)
"""Those of them that are also summed over decode steps alone, as ``decode_…``."""
_BREACHES = {
    "violations": "bound_holds (bound exceeded in {} buckets)",
    "pad_slots": "pads_take_no_slot ({} slots taken by pads)",
    "unenforced": "overload_drops ({} overloads without a drop)",
    "best_lost": "best_kept ({} tokens without one of their k0 best experts)",
    "wrong_modality": "modality_order (the wrong modality dropped in {} buckets)",
}


class LayerMeter:
    """Sums over the constrained forwards of one layer, kept on the layer's device."""

    def __init__(self, layer: MoeLayer, method: Method, calibrated: Tensor | None = None) -> None:
        self.layer = layer
        self.method = method  # with this layer's own γ
        self.forwards = 0
        self.faults = torch.zeros(3)  # the largest of any forward, see Gate.faults
        self.weighted: Weighted | None = None  # of this forward, for methods that weigh tokens
        self._calibrated = calibrated
        self._sums: Any = Counter()  # of tensors, and of whole numbers known on the host
        self._peaks: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._modality_peaks: defaultdict[str, list[Tensor]] = defaultdict(list)
        # The router's choice in the forward whose experts have not run yet, and for methods that
        # bound activation which of it are each token's k0 best.
        self._own_NK: Tensor | None = None
        self._best_TK: Tensor | None = None

    def calibrated_on(self, device: torch.device) -> Tensor | None:
        """Return what a calibration measured of the layer, if the method needs it.

        It is moved to a device once.
        """
        if self._calibrated is not None:
            self._calibrated = self._calibrated.to(device)
        return self._calibrated

    def _add(self, plan: ForwardPlan, **amounts: Tensor | int) -> None:
        """Add to the sums without waiting for the device."""
        self._sums.update(amounts)
        if plan.decode:
            decoded = amounts.keys() & set(DECODED)
            self._sums.update({f"decode_{name}": amounts[name] for name in decoded})

    @torch.no_grad()  # no part of the graph of a backward pass
    def note_router(self, scores: Scores, weight_TK: Tensor, own_NK: Tensor) -> None:
        """Note the router's own choice of every row, and its weights for the counted tokens."""
        self._own_NK = own_NK
        faults = self.layer.gate.faults(scores, weight_TK)
        self.faults = torch.maximum(moved(self.faults, faults.device), faults)
        if self.method.is_stock:  # gate scores by rank, a token's highest first (Figure 8)
            ranked_E = _sorted(scores.score_TE.detach()).sum(dim=0, dtype=torch.float64).flip(0)
            self._sums.update(score_by_rank=self.layer.ranks.total(ranked_E))
        if self.method.bounds_activation:
            self._best_TK = best_own(scores, self.method.k0)

    def note_experts(self, index_NS: Tensor, plan: ForwardPlan) -> None:
        """Count the pairs that the experts were called with, and compare them with the bound.

        ``index_NS`` is the expert of each slot of the batch; ``n_experts`` marks a dropped slot.

        Raises:
            EnforcementError: If the layer's router has not run in this forward.
        """
        n_experts, top_k, ranks = self.layer.n_experts, self.layer.top_k, self.layer.ranks
        groups, pads_N1, image_T, band_T = plan.on(index_NS.device)
        own_NK, self._own_NK = self._own_NK, None
        if own_NK is None:
            raise EnforcementError(f"{self.layer.name}: the experts ran without their router")
        topk_TK = groups.counted(own_NK)
        index_TS = groups.counted(index_NS)
        computed_TS, called_TE = index_TS < n_experts, _called_experts(index_TS, n_experts)
        lost_TK = ~called_TE.gather(1, topk_TK)
        cell_T, n_modalities = groups.group_T, 1
        if image_T is not None:
            cell_T, n_modalities = 2 * groups.group_T + image_T, 2
        shape_GME = (len(groups.tokens), n_modalities, n_experts)
        called_TS = index_TS.clamp(0, n_experts - 1)
        demand_GME = bucket_loads(cell_T, topk_TK, torch.ones_like(topk_TK), shape_GME)
        kept_GME = bucket_loads(cell_T, called_TS, computed_TS.long(), shape_GME)
        count_CT = torch.stack(  # as COUNTS has them
            [
                torch.ones_like(groups.group_T),
                lost_TK.sum(dim=1),
                called_TE.sum(dim=1) - (~lost_TK).sum(dim=1),
                (~called_TE.any(dim=1)).long(),
            ]
        )
        pads_N1 = pads_N1 & (not self.method.is_stock)
        pads_run = ranks is ALONE and self.method.bound is not None
        pad_slots = slots_of_pads(
            index_NS, pads_N1 & (index_NS < n_experts), lost_TK, own_NK if pads_run else None
        )
        demand_GME, kept_GME, count_CM, pad_slots = ranks.totals(
            demand_GME, kept_GME, by_modality(count_CT, image_T), pad_slots
        )
        self.forwards += 1
        if image_T is not None and band_T is not None:
            self._sums.update(band_counts=ranks.total(by_band(count_CT, image_T, band_T)))
            self._note_modalities(count_CM, demand_GME.sum(dim=0), kept_GME.sum(dim=0))
            if self.method.max_k:  # a token with K pairs may have lost others for its own sake
                lost_TK = lost_TK & (called_TE.sum(dim=1, keepdim=True) < top_k)
            lost_GME = ranks.total(bucket_loads(cell_T, topk_TK, lost_TK.long(), shape_GME))
            order = check_order(self.method, self._by_unit(lost_GME), self._by_unit(kept_GME))
            self._sums.update(order)
        demand_GE, kept_GE = demand_GME.sum(dim=1), kept_GME.sum(dim=1)
        demand_E, kept_E = demand_GE.sum(dim=0), kept_GE.sum(dim=0)
        _, dropped, added, lost_all = count_CM.sum(dim=1)
        self._add(
            plan,
            tokens=groups.n_tokens,
            assignments=groups.n_tokens * top_k,
            dropped=dropped,
            added=added,
            lost_all=lost_all,
            pad_slots=pad_slots,
            load_before=demand_E,
            load_after=kept_E,
            activated_before=(demand_E > 0).sum(),
            activated_after=(kept_E > 0).sum(),
        )
        self._note_peaks(demand_E, kept_E, groups.n_tokens)
        self._note_bounds(demand_GE, kept_GE, dropped, plan)
        counts = {"demand_E": demand_E, "kept_E": kept_E, "dropped": dropped}
        if self._best_TK is not None:
            best_TK, self._best_TK = self._best_TK, None
            best_E, best_lost = ranks.totals(
                bucket_loads(0 * groups.group_T, topk_TK, best_TK.long(), (n_experts,)),
                (best_TK & lost_TK).any(dim=1).sum(),
            )
            counts |= {"best_E": best_E, "best_lost": best_lost}
            known = self.calibrated_on(index_NS.device)
            self._sums.update(check_activation(self.method, **counts, calibrated=known))
        if self.weighted is not None:
            weighted, self.weighted = self.weighted, None
            called = {"topk_TK": topk_TK, "index_TS": index_TS, "kept_GE": kept_GE}
            base_G = self._capacity_on(plan, index_NS.device)
            checked = check_weights(
                weighted, groups, image_T, **called, base_G=base_G, dropped=dropped
            )
            self._sums.update(checked)

    def _note_peaks(self, demand_E: Tensor, kept_E: Tensor, n_tokens: int) -> None:
        """Record the highest load over the mean load N̄ before any drop (Figures 1, 2, 13-16)."""
        if not n_tokens:
            return
        mean = n_tokens * self.layer.top_k / self.layer.n_experts
        local = self.layer.n_experts // self.method.ep_size
        for when, load_E in (("before", demand_E), ("after", kept_E)):
            device_peak = self._by_device(load_E).max() / (mean * local)
            self._peaks[f"expert_{when}"].append(load_E.max() / mean)
            self._peaks[f"device_{when}"].append(device_peak)

    def _note_modalities(self, count_CM: Tensor, demand_ME: Tensor, kept_ME: Tensor) -> None:
        """Add a forward by modality: its counts, its loads and their peaks."""
        mean_M = demand_ME.sum(dim=1) / self.layer.n_experts
        self._sums.update(modality_counts=count_CM)
        for when, load_ME in (("before", demand_ME), ("after", kept_ME)):
            self._sums.update({f"modality_{when}": load_ME})
            self._modality_peaks[when].append(load_ME.amax(dim=1) / mean_M)  # NaN without a token

    def _note_bounds(
        self, demand_GE: Tensor, kept_GE: Tensor, dropped: Tensor, plan: ForwardPlan
    ) -> None:
        """Compare the loads with the capacities at the method's γ, and at those of the grid."""
        demand_GU, kept_GU = self._by_unit(demand_GE), self._by_unit(kept_GE)
        grid_XG = plan.capacities(GAMMA_GRID, self.layer, kept_GE.device)
        grid_XGU = grid_XG[:, :, None].expand(-1, *demand_GU.shape)
        self._sums.update(
            buckets=sum(tokens > 0 for tokens in plan.groups.tokens) * demand_GU.shape[1],
            grid_dropped=(demand_GU - grid_XGU).clamp_min(0).sum(dim=(1, 2)),
            grid_unused=(grid_XGU - demand_GU).clamp_min(0).sum(dim=(1, 2)),
            grid_slots=grid_XGU.sum(dim=(1, 2)),
        )
        if self.method.name == "expert_drop":
            idle = idle_experts(demand_GE.sum(dim=0))
            self._sums.update(violations=(kept_GE.sum(dim=0)[idle] > 0).sum())
        if self.method.gamma is None:  # without a capacity
            return
        limit_GU = self._capacity_on(plan, kept_GE.device)[:, None].expand_as(kept_GU)
        unused = (limit_GU - kept_GU).clamp_min(0).sum()
        self._add(plan, slots=limit_GU.sum(), unused_slots=unused)
        if not self.method.weighs_tokens:  # else no number of pairs is bounded
            self._sums.update(check_pairs(demand_GU, kept_GU, limit_GU, dropped))

    def _capacity_on(self, plan: ForwardPlan, device: torch.device) -> Tensor:
        """Return the capacity of each group at the layer's γ [G]."""
        assert self.method.gamma is not None
        return plan.capacities((self.method.gamma,), self.layer, device)[0]

    def _by_unit(self, load_GE: Tensor) -> Tensor:
        """Return the loads of experts […, E] as loads of the units that have a capacity […, U]."""
        if self.method.granularity == "expert":
            return load_GE
        return self._by_device(load_GE)

    def _by_device(self, load_GE: Tensor) -> Tensor:
        """Return the loads of experts […, E] as loads of the emulated ranks […, R]."""
        placed_RN = self.calibrated_on(load_GE.device) if self.method.is_placed else None
        return by_rank(load_GE, self.method.ep_size, placed_RN).sum(dim=-1)

    @property
    def has_images(self) -> bool:
        """True if a token of an image was counted."""
        return "modality_counts" in self._sums and bool(self._sums["modality_counts"][0, 1] > 0)

    def broken(self) -> Tensor:
        """Return the number of broken invariants of this layer so far, a scalar on its device."""
        broken: Tensor = self._is_off() + sum(self._sums[name] for name in _BREACHES)
        return broken

    def _is_off(self) -> Tensor:
        return (self.faults[1] > 1) | (self.faults[2] > 0)

    def misreads_gate(self) -> bool:
        """Return whether a forward showed that the router's gate works in another way."""
        return bool(self._is_off())

    def breaches(self) -> list[str]:
        """Return the broken invariants of this layer in words."""
        parts = [text.format(n) for name, text in _BREACHES.items() if (n := self.count(name))]
        _, off, misread = self.faults.tolist()
        if off > 1:
            times = f"weights off by {off:.1e} times what rounding explains"
            parts.append(f"gate_as_read ({times if off < math.inf else 'weights are NaN'})")
        if misread:
            parts.append(f"gate_as_read (the top-k of {misread:.0f} tokens is another)")
        return parts

    def count(self, name: str) -> int:
        """Return one of the sums, 0 if nothing was counted."""
        return int(self._sums[name])

    def report(self) -> dict[str, Any]:
        """Return the layer's statistics, JSON-ready; see ``docs/results.md``."""
        counts = {name: self.count(name) for name in SCALARS}
        total = max(counts["assignments"], 1)
        grid_slots = self._list("grid_slots")
        grid = zip(self._list("grid_unused"), grid_slots, strict=True)
        noted, tokens = self._list("score_by_rank"), max(counts["tokens"], 1)
        scores = [_finite(round(score / tokens, 8)) for score in noted] or None
        modalities = None
        if self.has_images:
            modalities = modality_report(self._sums, self._modality_peaks, self.layer.top_k)
        return {
            "name": self.layer.name,
            "n_experts": self.layer.n_experts,
            "top_k": self.layer.top_k,
            "forwards": self.forwards,
            **counts,
            **ratios(counts, self.method),
            **{name: self.count(name) / max(self.forwards, 1) for name in ACTIVATED},
            "load_before": self._list("load_before"),
            "load_after": self._list("load_after"),
            "score_by_rank": scores,
            "peak": {
                name: summary(torch.stack(peaks)) for name, peaks in sorted(self._peaks.items())
            },
            "grid": {
                "gamma": list(GAMMA_GRID),
                "drop_rate": [round(n / total, DIGITS) for n in self._list("grid_dropped")],
                "pad_waste": [round(n / slots, DIGITS) if slots else None for n, slots in grid],
                "effective_gamma": [round(slots / total, DIGITS) for slots in grid_slots],
            },
            "weight_deviation": _finite(float(self.faults[0])),
            **({"modalities": modalities} if modalities else {}),
        }

    def _list(self, name: str) -> list[Any]:
        return self._sums[name].tolist() if name in self._sums else []


def _called_experts(index_TS: Tensor, n_experts: int) -> Tensor:
    """Return a mask of the experts that each token's slots call, whatever their order [T, E]."""
    called_TE = index_TS.new_zeros(len(index_TS), n_experts + 1, dtype=torch.bool)
    return called_TE.scatter_(1, index_TS.clamp(0, n_experts), True)[:, :n_experts]


def _sorted(score_TE: Tensor) -> Tensor:
    """Return each row in rising order; on a CPU numpy is 15 times as fast as torch."""
    if score_TE.device.type == "cpu":
        return torch.from_numpy(np.sort(score_TE.numpy(), axis=-1))
    return score_TE.sort(dim=-1).values


def ratios(counts: Mapping[str, int], method: Method) -> dict[str, float | None]:
    """Return the ratios of the sums of one layer or of several.

    A bucket's mean load is T·K/U, so all buckets' mean loads are T·K together, and the effective
    capacity factor, the sum of all capacities over the sum of all mean loads, is slots over
    assignments.
    """
    return {
        "drop_rate": counts["dropped"] / max(counts["assignments"], 1),
        "pad_waste": _share(counts["unused_slots"], counts["slots"]),
        "mean_load": _share(counts["assignments"], counts["buckets"]),
        "effective_gamma": _share(counts["slots"], counts["assignments"])
        if method.is_capped
        else None,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _finite(number: float) -> float | None:
    """Return the number, or None for infinity and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None
