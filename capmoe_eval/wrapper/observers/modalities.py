"""Add up the loads of each modality, and check which modality was dropped first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import COUNTS, LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof, Sums
from capmoe_eval.wrapper.plan import BANDS, MODALITIES, ForwardPlan

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter

# Shape suffixes: T counted tokens, K = top-k, M modalities in the order of MODALITIES, C counts,
# B bands of an image, E experts, G groups, U units that have a capacity, W before and after.

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
        demand_ME, kept_ME = event.demand_GME.sum(dim=0), event.kept_GME.sum(dim=0)
        mean_M = demand_ME.sum(dim=1).float() / event.layer.n_experts
        sums.forwards += 1
        sums.add(
            counts=event.count_CM,
            bands=ranks.total(by_band(event.count_CT, event.image_T, band_T)),
            before=demand_ME,
            after=kept_ME,
        )
        highest_WM = torch.stack([demand_ME.amax(dim=1), kept_ME.amax(dim=1)])
        sums.add_peaks(highest_WM / mean_M)  # NaN without a token
        if self._method.modality in _FIRST:
            lost_GME = ranks.total(event.loads_GME(event.topk_TK, _lost(event).long()))
            lost_GMU, kept_GMU = event.by_unit(lost_GME), event.by_unit(event.kept_GME)
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


def _lost(event: LayerForward) -> Tensor:
    """Return a mask [T, K] of the pairs that a token lost to other tokens."""
    if event.method.max_k:  # a token with K pairs may have lost others for its own sake
        has_space_T = event.called_TE.sum(dim=1) < event.layer.top_k
        return event.lost_TK & has_space_T[:, None]
    return event.lost_TK


def by_band(count_CT: Tensor, image_T: Tensor, band_T: Tensor) -> Tensor:
    """Return the counts of image tokens by band [C, B]."""
    sum_CB = count_CT.new_zeros(len(count_CT), BANDS)
    return sum_CB.scatter_add_(1, band_T.expand_as(count_CT), count_CT * image_T)


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
