"""Add up the loads of experts, of all tokens and of each modality, and check their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import COUNTS, LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import DIGITS, Observer, Proof, Sums, finite
from capmoe_eval.wrapper.plan import BANDS, GAMMA_GRID, MODALITIES, ForwardPlan

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter

# Shape suffixes: T counted tokens, K = top-k, E experts, G capacity groups, U units that have a
# capacity (experts, or devices), X capacity factors of the grid, M modalities in the order of
# MODALITIES, C counts, B bands of an image, W before and after.

SCALARS = (
    "tokens",  # counted tokens T, summed over forwards
    "assignments",  # T·K
    "dropped",  # pairs of a token's own top-k that were not computed
    "added",  # computed pairs beyond a token's own top-k
    "lost_all",  # tokens none of whose pairs was computed
    "buckets",  # groups with a token, times units
    "slots",  # C summed over groups and units
    "unused_slots",  # of them, left empty
    "violations",  # buckets with more pairs than their bound
    "pad_slots",  # computed pairs of tokens that do not count
    "unenforced",  # forwards with an overloaded bucket in which nothing was dropped
    "overloaded",  # forwards with an overloaded bucket
)
"""The sums in the report of a layer; an extension's observer adds to the last five."""
ACTIVATED = ("activated_before", "activated_after")
"""Experts that some token chose, and experts that some token was sent to, summed over forwards."""
_PEAKS = ("device_after", "device_before", "expert_after", "expert_before")
"""The peaks of a forward in their order: the fullest rank's and expert's, before and after."""


class Loads(Observer):
    """Adds up loads, drops and slots, with the peaks of each forward and a grid of γ."""

    faults: ClassVar[Mapping[str, str]] = {
        "violations": "bound_holds (bound exceeded in {} buckets)",
        "pad_slots": "pads_take_no_slot ({} slots taken by pads)",
        "unenforced": "overload_drops ({} overloads without a drop)",
        "unfilled": "slots_filled ({} buckets dropped pairs that they had slots for)",
    }

    def __init__(self, layers: Sequence[MoeLayer], method: Method) -> None:
        super().__init__(len(layers))
        self._layers, self._method = layers, method
        self.is_sampled = method.is_stock  # without a bound

    def see(self, event: LayerForward) -> None:
        """Count one forward of a layer."""
        sums, tokens = self.sums[event.number], event.n_tokens
        if self._method.is_stock:  # gate scores by rank, a token's highest first (Figure 8)
            score_TE = event.scores.score_TE
            if score_TE.device.type == "cpu":  # where numpy is 15 times as fast as torch
                rising_TE = torch.from_numpy(np.sort(score_TE.numpy(), axis=-1))
            else:
                rising_TE = score_TE.sort(dim=-1).values
            ranked_E = rising_TE.sum(dim=0, dtype=torch.float64).flip(0)
            sums.add(score_by_rank=event.layer.ranks.total(ranked_E))
        sums.forwards += 1
        _, dropped, added, lost_all = event.count_C
        sums.add(
            tokens=tokens,
            assignments=tokens * event.layer.top_k,
            dropped=dropped,
            added=added,
            lost_all=lost_all,
            pad_slots=event.totals.pad_slots,
            load_before=event.demand_E,
            load_after=event.kept_E,
            **activated(event),
        )
        if tokens:
            sums.add_peaks(_peaks(event))
        _add_bounds(sums, event)
        if event.plan.decode:
            _add_step(sums, event)

    def layer(self, number: int) -> dict[str, Any]:
        """Return the statistics of a layer."""
        layer, sums = self._layers[number], self.sums[number]
        counts = {name: sums.count(name) for name in SCALARS}
        total = max(counts["assignments"], 1)
        grid_slots = sums.values("grid_slots")
        grid = zip(sums.values("grid_unused"), grid_slots, strict=True)
        tokens = max(counts["tokens"], 1)
        scores = [
            finite(round(score / tokens, 8)) for score in sums.values("score_by_rank")
        ] or None
        return {
            "name": layer.name,
            "n_experts": layer.n_experts,
            "top_k": layer.top_k,
            "forwards": sums.forwards,
            **counts,
            **ratios(counts, self._method),
            **{name: sums.count(name) / max(sums.forwards, 1) for name in ACTIVATED},
            "load_before": sums.values("load_before"),
            "load_after": sums.values("load_after"),
            "score_by_rank": scores,
            "peak": {}
            if sums.peaks is None
            else {name: sums.peak_figures(place) for place, name in enumerate(_PEAKS)},
            "grid": {
                "gamma": list(GAMMA_GRID),
                "drop_rate": [round(n / total, DIGITS) for n in sums.values("grid_dropped")],
                "pad_waste": [round(n / slots, DIGITS) if slots else None for n, slots in grid],
                "effective_gamma": [round(slots / total, DIGITS) for slots in grid_slots],
            },
        }

    def summary(self) -> dict[str, Any]:
        """Return the statistics over all layers and forwards."""
        total = self.totals(*SCALARS, *ACTIVATED)
        forwards = max(sum(sums.forwards for sums in self.sums), 1)
        peaks = {
            when: [of.peak_figures(_PEAKS.index(f"expert_{when}")) for of in self.sums if of.peaks]
            for when in ("before", "after")
        }
        most = {when: [of["max"] for of in peaks[when] if of] for when in peaks}
        mean = {when: [of["mean"] for of in peaks[when] if of] for when in peaks}
        return {
            "tokens": max(sums.count("tokens") for sums in self.sums),
            **{name: total[name] for name in COUNTS[1:]},
            **ratios(total, self._method),
            "peak_before": max(most["before"], default=None),
            "peak_after": max(most["after"], default=None),
            "mean_peak_before": _mean(mean["before"]),
            "mean_peak_after": _mean(mean["after"]),
            **{name: total[name] / forwards for name in ACTIVATED},
            **self._of_steps(),
        }

    def _of_steps(self) -> dict[str, Any]:
        """Return the statistics of decode steps, if there were any under the method."""
        steps = self.sums[0].count("steps")
        if not steps:
            return {}
        total = self.totals("step_assignments", "step_dropped", "step_slots")
        activated = self.totals(*(f"step_{name}" for name in ACTIVATED)).values()
        assignments = max(total["step_assignments"], 1)
        effective = total["step_slots"] / assignments if self._method.is_capped else None
        means = (number / (steps * len(self.sums)) for number in activated)
        return {
            "decode": {
                "live": self.sums[0].count("live") / steps,
                "drop_rate": total["step_dropped"] / assignments,
                "effective_gamma": effective,
                **dict(zip(ACTIVATED, means, strict=True)),
            }
        }

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return the invariants of bounds and of pads, with the faults of other observers."""
        method, overloaded = self._method, meter.count("overloaded")
        sums = [part for of in meter.observers for part in of.sums if isinstance(part, Sums)]
        no_slots = "without a capacity there are no slots" if method.is_stock else None
        if method.count_padding and not method.is_stock:
            no_slots = "count_padding: pads count like tokens"
        return {
            "bound_holds": meter.proof(
                {"violations": meter.count("violations")},
                None if any("violations" in of for of in sums) else "the method bounds nothing",
                checked=self.checked,
                examined=True,
            ),
            "pads_take_no_slot": meter.proof(
                {"pad_slots": meter.count("pad_slots")},
                no_slots,
                checked=self.checked,
                examined=True,
            ),
            "overload_drops": meter.proof(
                {"violations": meter.count("unenforced")},
                None if overloaded else "no load exceeded its bound",
                checked=self.checked,
                overloaded=overloaded,
            ),
            "slots_filled": meter.proof(
                {"violations": self.count("unfilled")},
                None if _fills_slots(method) else "the method may leave slots empty",
                checked=self.checked,
            ),
        }


def activated(event: LayerForward) -> dict[str, Tensor]:
    """Return the numbers of experts of :data:`ACTIVATED` in a layer's forward."""
    loads = event.demand_E, event.kept_E
    return dict(zip(ACTIVATED, [(load_E > 0).sum() for load_E in loads], strict=True))


def _peaks(event: LayerForward) -> Tensor:
    """Return the highest loads over the mean load N̄ before any drop (Figures 1, 2, 13-16)."""
    n_experts, loads = event.layer.n_experts, (event.kept_E, event.demand_E)
    mean = event.n_tokens * event.layer.top_k / n_experts
    local = n_experts // event.method.ep_size
    ranks = (event.by_device(load_E) for load_E in loads)
    # A quotient of whole numbers would have torch's default precision.
    of_ranks = [load_R.max().float() / (mean * local) for load_R in ranks]
    return torch.stack([*of_ranks, *(load_E.max().float() / mean for load_E in loads)])


def _add_bounds(sums: Sums, event: LayerForward) -> None:
    """Compare the loads with the capacities at the method's γ, and at those of the grid."""
    plan, method = event.plan, event.method
    demand_GU, kept_GU = event.by_unit(event.demand_GE), event.by_unit(event.kept_GE)
    grid_XG = plan.capacities(GAMMA_GRID, event.layer, kept_GU.device)
    grid_XGU = grid_XG[:, :, None].expand(-1, *demand_GU.shape)
    sums.add(
        buckets=sum(tokens > 0 for tokens in plan.groups.tokens) * demand_GU.shape[1],
        grid_dropped=(demand_GU - grid_XGU).clamp_min(0).sum(dim=(1, 2)),
        grid_unused=(grid_XGU - demand_GU).clamp_min(0).sum(dim=(1, 2)),
        grid_slots=grid_XGU.sum(dim=(1, 2)),
    )
    computed = method.wrongly_computed(event.demand_E, event.kept_E)
    if computed is not None:
        sums.add(violations=computed)
    if method.factor is None:  # without a capacity
        return
    limit_GU = event.limit_G[:, None].expand_as(kept_GU)
    sums.add(slots=limit_GU.sum(), unused_slots=(limit_GU - kept_GU).clamp_min(0).sum())
    if method.bounds_pairs:
        beyond_GU, overloaded = kept_GU > limit_GU, (demand_GU > limit_GU).any()
        sums.add(**bound_faults(beyond_GU, overloaded, event.dropped))
    if _fills_slots(method):
        sums.add(unfilled=(kept_GU < demand_GU.minimum(limit_GU)).sum())


def _add_step(sums: Sums, event: LayerForward) -> None:
    """Add up the drops, the slots and the activated experts of a decode step."""
    sums.add(
        steps=1,
        step_assignments=event.n_tokens * event.layer.top_k,
        step_dropped=event.dropped,
        **{f"step_{name}": number for name, number in activated(event).items()},
    )
    if event.number == 0:
        sums.add(live=event.layer.ranks.total(event.plan.live))
    if event.method.factor is not None:
        units = event.by_unit(event.kept_GE).shape[1]
        sums.add(step_slots=event.limit_G.sum() * units)


def _fills_slots(method: Method) -> bool:
    """Return whether a unit that loses a pair of a token's own choice is full."""
    return method.fills_slots and not method.max_k  # by which a token, too, loses pairs


def bound_faults(beyond: Tensor, overloaded: Tensor, dropped: Tensor) -> dict[str, Tensor]:
    """Return a forward's faults against a bound, as sums of :data:`SCALARS`.

    Args:
        beyond: True for a bucket beyond its bound.
        overloaded: Whether one would have been by the router's own choice [].
        dropped: Number of lost pairs [].
    """
    return {
        "violations": beyond.sum(),
        "overloaded": overloaded.long(),
        "unenforced": (overloaded & (dropped == 0)).long(),
    }


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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Modalities.

_FIRST = {"text_first": 0, "image_first": 1}  # number of the modality that is dropped first


def _has_images(sums: Sums) -> bool:
    return "counts" in sums and bool(sums.tensor("counts")[0, 1] > 0)


class Modalities(Observer):
    """Adds up loads and drops of text and of images, where a model may be given images."""

    faults: ClassVar[Mapping[str, str]] = {
        "wrong_modality": "modality_order (the wrong modality dropped in {} buckets)"
    }

    def __init__(self, layers: Sequence[MoeLayer], method: Method) -> None:
        super().__init__(len(layers))
        self._layers, self._method = layers, method

    def wants(self, plan: ForwardPlan) -> bool:
        """Return whether a forward under the method may have images."""
        return plan.constrained and plan.image_BS is not None

    def see(self, event: LayerForward) -> None:
        """Count one forward of a layer."""
        sums, ranks = self.sums[event.number], event.layer.ranks
        band_T = event.plan.on(event.topk_NK.device).band_T
        assert event.image_T is not None
        assert band_T is not None
        demand_ME, kept_ME = event.totals.demand_GME.sum(dim=0), event.totals.kept_GME.sum(dim=0)
        mean_M = demand_ME.sum(dim=1).float() / event.layer.n_experts
        of_images_CT = event.count_CT * event.image_T
        bands_CB = of_images_CT.new_zeros(len(of_images_CT), BANDS)
        bands_CB.scatter_add_(1, band_T.expand_as(of_images_CT), of_images_CT)
        sums.forwards += 1
        sums.add(
            counts=event.totals.count_CM,
            bands=ranks.total(bands_CB),
            before=demand_ME,
            after=kept_ME,
        )
        highest_WM = torch.stack([demand_ME.amax(dim=1), kept_ME.amax(dim=1)])
        sums.add_peaks(highest_WM / mean_M)  # NaN without a token
        if self._method.modality in _FIRST:
            lost_TK = event.lost_TK  # to other tokens
            if event.method.max_k:  # a token with K pairs may have lost others for its own sake
                lost_TK = lost_TK & (event.called_TE.sum(dim=1) < event.layer.top_k)[:, None]
            lost_GME = ranks.total(event.loads_GME(event.topk_TK, lost_TK.long()))
            lost_GMU, kept_GMU = event.by_unit(lost_GME), event.by_unit(event.totals.kept_GME)
            first = _FIRST[self._method.modality]
            protected_lost_GU = lost_GMU[:, 1 - first] > 0
            sums.add(
                wrong_modality=(protected_lost_GU & (kept_GMU[:, first] > 0)).sum(),
                # Pairs of the first were lost, and protected ones kept.
                spared=((lost_GMU[:, first] > 0) & (kept_GMU[:, 1 - first] > 0)).sum(),
                protected_lost=protected_lost_GU.sum(),
            )

    @property
    def has_images(self) -> bool:
        """True if a token of an image was counted."""
        return any(map(_has_images, self.sums))

    def layer(self, number: int) -> dict[str, Any]:
        """Return the statistics of each modality in a layer."""
        sums, top_k = self.sums[number], self._layers[number].top_k
        return {"modalities": modality_report(sums, top_k)} if _has_images(sums) else {}

    def summary(self) -> dict[str, Any]:
        """Return the sums over layers of each modality; its tokens are those of one layer."""
        if not self.has_images:
            return {}
        reports = [modality_report(sums, 1) for sums in self.sums]
        modalities = {}
        for name in MODALITIES:
            parts = [report[name] for report in reports]
            asked = sum(sum(part["load_before"]) for part in parts)
            total = {count: sum(part[count] for part in parts) for count in COUNTS}
            tokens = max(part["tokens"] for part in parts)
            drop_rate = total["dropped"] / max(asked, 1)
            modalities[name] = total | {"tokens": tokens, "drop_rate": drop_rate}
        return {"modalities": modalities}

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return whether the modality to be dropped first was dropped first."""
        if not self.has_images:
            return {}
        why = "no modality is dropped first" if self._method.modality not in _FIRST else None
        proof = meter.proof(
            {"violations": self.count("wrong_modality")},
            why,
            checked=self.checked,
            spared=self.count("spared"),
            protected_lost=self.count("protected_lost"),
        )
        return {"modality_order": proof}


def modality_report(sums: Sums, top_k: int) -> dict[str, Any]:
    """Return the statistics of each modality in a layer with ``top_k`` experts per token."""
    report: dict[str, Any] = {}
    for number, name in enumerate(MODALITIES):
        counts = dict(zip(COUNTS, sums.tensor("counts")[:, number].tolist(), strict=True))
        before, after = (sums.peak_figures(when, number) for when in (0, 1))
        report[name] = {
            **counts,
            "drop_rate": counts["dropped"] / max(counts["tokens"] * top_k, 1),
            "load_before": sums.values("before")[number],
            "load_after": sums.values("after")[number],
            "peak": {"before": before, "after": after},
        }
    bands = dict(zip(COUNTS, sums.values("bands"), strict=True))
    report["image"]["bands"] = {name: bands[name] for name in ("tokens", "dropped")}
    return report
