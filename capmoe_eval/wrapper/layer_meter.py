"""Count the load of one layer from the indices that its experts are called with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.homes import by_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.weighted import Weighted
from capmoe_eval.wrapper.activation_meter import check_activation, count_activated
from capmoe_eval.wrapper.gates import tolerance
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.modality_meter import (
    DIGITS,
    ModalityMeter,
    by_band,
    by_modality,
    summary,
)
from capmoe_eval.wrapper.plan import GAMMA_GRID, ForwardPlan
from capmoe_eval.wrapper.weight_meter import check_weights

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
    "violations": "bound exceeded in {} buckets",
    "pad_slots": "{} slots taken by pads",
    "unenforced": "{} overloads without a drop",
    "best_lost": "{} tokens without one of their k0 best experts",
}


class LayerMeter:
    """Sums over the constrained forwards of one layer, kept on the layer's device."""

    def __init__(self, layer: MoeLayer, method: Method, calibrated: Tensor | None = None) -> None:
        self.layer = layer
        self._calibrated = calibrated
        self.forwards = 0
        # Largest deviation of the recipe's weights from the router's; None before any forward.
        self.deviation: Tensor | None = None
        self._tolerance = 0.0
        self._method = method
        self._experts_per_rank = experts_per_rank(layer.n_experts, method.ep_size)
        self._sums: dict[str, Any] = {}  # tensors, and whole numbers known on the host
        self._peaks: dict[str, list[Tensor]] = {}
        # Of the forward whose experts have not run yet: the router's choice, and for methods that
        # bound activation which of it are each token's k0 best.
        self._choice_TK: Tensor | None = None
        self._best_TK: Tensor | None = None
        self._weighted: Weighted | None = None  # of that forward, for methods that weigh tokens
        self.modalities = ModalityMeter(method)

    @property
    def method(self) -> Method:
        """The method, with this layer's own γ."""
        return self._method

    def calibrated_on(self, device: torch.device) -> Tensor | None:
        """Return what a calibration measured of the layer, if the method needs it.

        It is moved to a device once.
        """
        if self._calibrated is not None:
            self._calibrated = self._calibrated.to(device)
        return self._calibrated

    def _add(self, **amounts: Tensor | int) -> None:
        """Add to the sums without waiting for the device."""
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0) + amount

    def note_router(self, topk_TK: Tensor, deviation: Tensor, dtype: torch.dtype) -> None:
        """Note the router's own choice for the counted tokens, before any capacity.

        ``deviation`` is that of the recipe's weights from the router's, which are of ``dtype``.
        """
        self._choice_TK = topk_TK
        self._tolerance = tolerance(dtype)
        # NaN counts as an infinite deviation, because comparisons with NaN are false.
        deviation = deviation.nan_to_num(nan=torch.inf, posinf=torch.inf)
        if self.deviation is not None:
            deviation = torch.maximum(self.deviation, deviation)
        self.deviation = deviation

    def note_best(self, best_TK: Tensor) -> None:
        """Note which slots of the router's own choice are each token's k0 best."""
        self._best_TK = best_TK

    def note_weights(self, weighted: Weighted) -> None:
        """Note the weights of the counted tokens and the capacities of experts."""
        self._weighted = weighted

    def note_scores(self, score_TE: Tensor) -> None:
        """Add up the gate scores by rank, a token's highest first (Figure 8)."""
        ranked_E = _sorted(score_TE.detach()).sum(dim=0, dtype=torch.float64).flip(0)
        self._add(score_by_rank=self.layer.ranks.total(ranked_E))

    def note_experts(self, index_NS: Tensor, plan: ForwardPlan) -> None:
        """Count the pairs that the experts were called with, and compare them with the bound.

        ``index_NS`` is the expert of each slot of the batch; ``n_experts`` marks a dropped slot.

        Raises:
            EnforcementError: If the layer's router has not run in this forward.
        """
        n_experts, top_k = self.layer.n_experts, self.layer.top_k
        groups = plan.groups_on(index_NS.device)
        images = plan.images_on(index_NS.device)
        image_T = None if images is None else images.image_T
        topk_TK, self._choice_TK = self._choice_TK, None
        if topk_TK is None:
            raise EnforcementError(f"{self.layer.name}: the experts ran without their router")
        index_TS = groups.counted(index_NS)
        computed_TS = index_TS < n_experts
        lost_TK = ~computed_TS[:, :top_k]
        cell_T = groups.group_T if image_T is None else 2 * groups.group_T + image_T
        shape_GME = (len(groups.tokens), 1 if image_T is None else 2, n_experts)
        demand_GME = _loads(cell_T, topk_TK, torch.ones_like(topk_TK), shape_GME)
        kept_GME = _loads(cell_T, index_TS.clamp_max(n_experts - 1), computed_TS, shape_GME)
        count_CT = torch.stack(  # as COUNTS has them
            [
                torch.ones_like(groups.group_T),
                lost_TK.sum(dim=1),
                computed_TS[:, top_k:].sum(dim=1),
                (~computed_TS.any(dim=1)).long(),
            ]
        )
        count_CM = by_modality(count_CT, image_T)
        pad_slots = torch.zeros((), dtype=torch.long, device=index_NS.device)
        if not self._method.is_stock:
            pad_slots = ((index_NS < n_experts) & plan.pads_on(index_NS.device)).sum()
        demand_GME, kept_GME, count_CM, pad_slots = self.layer.ranks.totals(
            demand_GME, kept_GME, count_CM, pad_slots
        )
        self.forwards += 1
        if images is not None:
            band_CB = self.layer.ranks.total(by_band(count_CT, *images))
            self.modalities.note(count_CM, demand_GME.sum(dim=0), kept_GME.sum(dim=0), band_CB)
            if self._method.max_k:  # a token with K pairs may have lost others for its own sake
                lost_TK = lost_TK & (computed_TS.sum(dim=1, keepdim=True) < top_k)
            lost_GME = self.layer.ranks.total(_loads(cell_T, topk_TK, lost_TK, shape_GME))
            self.modalities.note_order(self._by_unit(lost_GME), self._by_unit(kept_GME))
        demand_GE, kept_GE = demand_GME.sum(dim=1), kept_GME.sum(dim=1)
        _, dropped, added, lost_all = count_CM.sum(dim=1)
        self._add(
            tokens=groups.n_tokens,
            assignments=groups.n_tokens * top_k,
            dropped=dropped,
            added=added,
            lost_all=lost_all,
            pad_slots=pad_slots,
        )
        if plan.decode:
            self._add(decode_assignments=groups.n_tokens * top_k, decode_dropped=dropped)
        for when, load_E in (("before", demand_GE.sum(dim=0)), ("after", kept_GE.sum(dim=0))):
            self._add(**{f"load_{when}": load_E})
            if groups.n_tokens:
                self._note_peaks(when, load_E, groups.n_tokens)
        self._note_bounds(demand_GE, kept_GE, dropped, plan)
        self._note_weight(plan, topk_TK, index_TS, kept_GE=kept_GE, dropped=dropped)
        loads = {"demand_E": demand_GE.sum(dim=0), "kept_E": kept_GE.sum(dim=0)}
        activated = count_activated(**loads)
        self._add(**activated)
        if plan.decode:
            self._add(**{f"decode_{name}": count for name, count in activated.items()})
        if self._best_TK is not None:
            best_TK, self._best_TK = self._best_TK, None
            zero_T, shape = torch.zeros_like(groups.group_T), (1, 1, n_experts)
            best_lost = (best_TK & lost_TK).any(dim=1).sum()
            best_E, best_lost = self.layer.ranks.totals(
                _loads(zero_T, topk_TK, best_TK, shape).view(-1), best_lost
            )
            self._add(
                **check_activation(
                    self._method,
                    **loads,
                    best_E=best_E,
                    best_lost=best_lost,
                    dropped=dropped,
                    calibrated=self.calibrated_on(index_NS.device),
                )
            )

    def _note_peaks(self, when: str, load_E: Tensor, n_tokens: int) -> None:
        """Record the highest load over the mean load N̄ before any drop (Figures 1, 2, 13-16)."""
        mean, local = n_tokens * self.layer.top_k / self.layer.n_experts, self._experts_per_rank
        device_peak = self._by_device(load_E).max() / (mean * local)
        self._peaks.setdefault(f"expert_{when}", []).append(load_E.max() / mean)
        self._peaks.setdefault(f"device_{when}", []).append(device_peak)

    def _note_bounds(
        self, demand_GE: Tensor, kept_GE: Tensor, dropped: Tensor, plan: ForwardPlan
    ) -> None:
        """Compare the loads with the capacities at the method's γ, and at those of the grid."""
        method, n_experts = self._method, self.layer.n_experts
        size = (self.layer.top_k, n_experts, demand_GE.device)
        demand_GU, kept_GU = self._by_unit(demand_GE), self._by_unit(kept_GE)
        grid_XGU = plan.capacities(GAMMA_GRID, *size)[:, :, None].expand(-1, *demand_GU.shape)
        self._add(
            buckets=sum(tokens > 0 for tokens in plan.groups.tokens) * demand_GU.shape[1],
            grid_dropped=(demand_GU - grid_XGU).clamp_min(0).sum(dim=(1, 2)),
            grid_unused=(grid_XGU - demand_GU).clamp_min(0).sum(dim=(1, 2)),
            grid_slots=grid_XGU.sum(dim=(1, 2)),
        )
        if method.name == "expert_drop":
            lowest = demand_GE.sum(dim=0).argsort(stable=True)[: max(1, n_experts // 10)]
            self._add(violations=(kept_GE.sum(dim=0)[lowest] > 0).sum())
        if method.gamma is None:  # without a capacity
            return
        limit_G = self._capacity(plan, demand_GE.device)
        limit_GU = limit_G[:, None].expand_as(kept_GU)
        overloaded = (demand_GU > limit_GU).any()
        slots = limit_GU.sum()
        if plan.decode:
            self._add(decode_slots=slots)
        self._add(
            slots=slots,
            unused_slots=(limit_GU - kept_GU).clamp_min(0).sum(),
        )
        if method.weighs_tokens:  # no number of them is bounded
            return
        self._add(
            violations=(kept_GU > limit_GU).sum(),
            overloaded=overloaded.long(),
            unenforced=(overloaded & (dropped == 0)).long(),
        )

    def _note_weight(
        self, plan: ForwardPlan, topk_TK: Tensor, index_TS: Tensor, **counts: Tensor
    ) -> None:
        """Compare the weights that experts are sent with their capacities, where these are known.

        ``counts`` are those that :func:`check_weights` takes.
        """
        weighted, self._weighted = self._weighted, None
        if weighted is None:
            return
        images, groups = plan.images_on(topk_TK.device), plan.groups_on(topk_TK.device)
        base_G = self._capacity(plan, topk_TK.device)
        image_T = None if images is None else images.image_T
        called = {"topk_TK": topk_TK, "index_TS": index_TS, "base_G": base_G}
        self._add(**check_weights(weighted, groups, image_T, **called, **counts))

    def _capacity(self, plan: ForwardPlan, device: torch.device) -> Tensor:
        """Return the capacity of each group at the layer's γ [G]."""
        assert self._method.gamma is not None
        size = (self.layer.top_k, self.layer.n_experts, device)
        return plan.capacities((self._method.gamma,), *size)[0]

    def _by_unit(self, load_GE: Tensor) -> Tensor:
        """Return the loads of experts […, E] as loads of the units that have a capacity […, U]."""
        if self._method.granularity == "expert":
            return load_GE
        return self._by_device(load_GE)

    def _by_device(self, load_GE: Tensor) -> Tensor:
        """Return the loads of experts […, E] as loads of the emulated ranks […, R]."""
        placed_RN = self.calibrated_on(load_GE.device) if self._method.is_placed else None
        return by_rank(load_GE, self._method.ep_size, placed_RN).sum(dim=-1)

    def broken(self) -> Tensor:
        """Return the number of broken promises of this layer so far, a scalar on its device."""
        broken: Tensor = torch.tensor(0) + sum(self._sums.get(name, 0) for name in _BREACHES)
        broken = broken + self.modalities.broken()
        if self.deviation is not None:
            broken = broken + (self.deviation > self._tolerance).to(broken.device)
        return broken

    def breaches(self) -> str:
        """Return the broken promises of this layer in words, or an empty string."""
        parts = [text.format(n) for name, text in _BREACHES.items() if (n := self.count(name))]
        if wrong := int(self.modalities.broken()):
            parts.append(f"the wrong modality dropped in {wrong} buckets")
        off = 0.0 if self.deviation is None else float(self.deviation)
        if off > self._tolerance:
            parts.append(f"weights off by {off:.1e}" if off < math.inf else "weights are NaN")
        return f"{self.layer.name}: {', '.join(parts)}" if parts else ""

    def count(self, name: str) -> int:
        """Return one of the sums, 0 if nothing was counted."""
        return int(self._sums.get(name, 0))

    def report(self) -> dict[str, Any]:
        """Return the layer's statistics, JSON-ready; see ``docs/results.md``."""
        counts = {name: self.count(name) for name in SCALARS}
        total = max(counts["assignments"], 1)
        grid_slots = self._list("grid_slots")
        grid = zip(self._list("grid_unused"), grid_slots, strict=True)
        noted, tokens = self._list("score_by_rank"), max(counts["tokens"], 1)
        scores = [_finite(round(score / tokens, 8)) for score in noted] or None
        return {
            "name": self.layer.name,
            "n_experts": self.layer.n_experts,
            "top_k": self.layer.top_k,
            "forwards": self.forwards,
            **counts,
            **ratios(counts, self._method),
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
                "pad_waste": [_rounded(_share(unused, slots)) for unused, slots in grid],
                "effective_gamma": [round(slots / total, DIGITS) for slots in grid_slots],
            },
            "weight_deviation": 0.0 if self.deviation is None else _finite(float(self.deviation)),
            **(
                {"modalities": self.modalities.report(self.layer.top_k)}
                if self.modalities.has_images
                else {}
            ),
        }

    def _list(self, name: str) -> list[Any]:
        return self._sums[name].tolist() if name in self._sums else []


def _sorted(score_TE: Tensor) -> Tensor:
    """Return each row sorted in rising order; on a CPU numpy is 15 times as fast as torch."""
    if score_TE.device.type == "cpu":
        return torch.from_numpy(np.sort(score_TE.numpy(), axis=-1))
    return score_TE.sort(dim=-1).values


def _loads(
    cell_T: Tensor, index_TS: Tensor, counts_TS: Tensor, shape_GME: tuple[int, int, int]
) -> Tensor:
    """Return the number of counted slots from each group and modality to each expert [G, M, E].

    ``cell_T`` is the place of each token's group and modality among all of them.
    """
    load = torch.zeros(shape_GME, dtype=torch.int64, device=index_TS.device)
    bucket_TS = cell_T[:, None] * shape_GME[2] + index_TS
    load.view(-1).scatter_add_(0, bucket_TS.reshape(-1), counts_TS.long().reshape(-1))
    return load


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, DIGITS)


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
