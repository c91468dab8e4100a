"""Count the load of one layer by modality, and check which modality was dropped first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.modality import BANDS, MODALITIES

# Shape suffixes: T counted tokens, M modalities in the order of MODALITIES (one, text, where a
# model has no images), C counts, B bands of an image, E experts, G groups, U bounded units.

COUNTS = ("tokens", "dropped", "added", "lost_all")
"""Counts of a layer by modality, as of all its tokens."""
_FIRST = {"text_first": 0, "image_first": 1}  # number of the modality that is dropped first


def by_modality(count_CT: Tensor, image_T: Tensor | None) -> Tensor:
    """Return the sums [C, M] of whole numbers of tokens."""
    total_C = count_CT.sum(dim=1)
    if image_T is None:
        return total_C[:, None]
    of_images_C = (count_CT * image_T).sum(dim=1)
    return torch.stack([total_C - of_images_C, of_images_C], dim=1)


def by_band(count_CT: Tensor, image_T: Tensor, band_T: Tensor) -> Tensor:
    """Return the sums [C, B] of whole numbers of the tokens of images."""
    sum_CB = count_CT.new_zeros(len(count_CT), BANDS)
    return sum_CB.scatter_add_(1, band_T.expand_as(count_CT), count_CT * image_T)


class ModalityMeter:
    """Sums over the constrained forwards of one layer of a model with images."""

    def __init__(self, method: Method) -> None:
        self._first = _FIRST.get(method.modality)
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, list[Tensor]] = {"before": [], "after": []}

    def note(self, count_CM: Tensor, before_ME: Tensor, after_ME: Tensor, band_CB: Tensor) -> None:
        """Add a forward: its :data:`COUNTS`, the loads before and after the capacity, the bands."""
        self._add(counts=count_CM, before=before_ME, after=after_ME, bands=band_CB)
        mean_M = before_ME.sum(dim=1) / before_ME.shape[1]
        for when, load_ME in (("before", before_ME), ("after", after_ME)):
            self._peaks[when].append(load_ME.amax(dim=1) / mean_M)  # NaN without a token

    def note_order(self, lost_GMU: Tensor, kept_GMU: Tensor) -> None:
        """Check a forward: where a protected pair was lost, no pair of the other was kept.

        ``lost_GMU`` are the pairs of tokens' own top-k that each unit did not compute, ``kept_GMU``
        all those that it did.
        """
        if self._first is None:
            return
        lost_GU, other_GU = lost_GMU[:, 1 - self._first], kept_GMU[:, self._first]
        self._add(
            violations=((lost_GU > 0) & (other_GU > 0)).sum(),
            protected_lost=(lost_GU > 0).sum(),
            spared=((lost_GMU[:, self._first] > 0) & (kept_GMU[:, 1 - self._first] > 0)).sum(),
        )

    def _add(self, **amounts: Tensor) -> None:
        for name, amount in amounts.items():
            self._sums[name] = self._sums[name] + amount if name in self._sums else amount

    def broken(self) -> Tensor | int:
        """Return the number of buckets in which the wrong modality was dropped."""
        return self._sums.get("violations", 0)

    def order(self) -> dict[str, int]:
        """Return counts of buckets, summed over forwards: of broken ones, and of each outcome.

        ``spared``: pairs of the named modality were dropped and pairs of the other kept.
        ``protected_lost``: pairs of the other modality were dropped, too.
        """
        names = ("violations", "spared", "protected_lost")
        return {name: int(self._sums.get(name, 0)) for name in names}

    @property
    def has_images(self) -> bool:
        """True if a token of an image was counted."""
        return "counts" in self._sums and int(self._sums["counts"][0, 1]) > 0

    def report(self, top_k: int) -> dict[str, Any]:
        """Return the statistics of each modality, JSON-ready; see ``docs/results.md``."""
        found = {}
        for number, name in enumerate(MODALITIES):
            counts = dict(zip(COUNTS, self._sums["counts"][:, number].tolist(), strict=True))
            found[name] = {
                **counts,
                "drop_rate": counts["dropped"] / max(counts["tokens"] * top_k, 1),
                "load_before": self._sums["before"][number].tolist(),
                "load_after": self._sums["after"][number].tolist(),
                "peak": {when: self._peak(when, number) for when in ("before", "after")},
            }
        bands = dict(zip(COUNTS, self._sums["bands"].tolist(), strict=True))
        found["image"]["bands"] = {name: bands[name] for name in ("tokens", "dropped")}
        return found

    def _peak(self, when: str, number: int) -> dict[str, float] | None:
        """Return mean, maximum and last value of the peaks of forwards with the modality."""
        peaks = torch.stack(self._peaks[when])[:, number]
        return summary(peaks[~peaks.isnan()])


def summary(values: Tensor) -> dict[str, float] | None:
    """Return mean, maximum and last of some values, rounded for figures; None without a value."""
    if not len(values):
        return None
    values = values.double()
    found = {"mean": values.mean(), "max": values.max(), "last": values[-1]}
    return {name: round(float(value), DIGITS) for name, value in found.items()}


DIGITS = 6
"""Decimals of ratios that only figures show."""
