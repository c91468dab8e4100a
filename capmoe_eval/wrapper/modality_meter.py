"""Count the load of one layer by modality, and check which modality was dropped first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.modality import BANDS, MODALITIES

# Shape suffixes: T counted tokens, M modalities in the order of MODALITIES (one, text, where a
# model has no images), C counts, B bands of an image, E experts, G groups, U bounded units.

COUNTS = ("tokens", "dropped", "added", "lost_all")
"""Counts of a layer by modality, as of all its tokens."""
DIGITS = 6
"""Decimals of ratios that only figures show."""
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


def check_order(method: Method, lost_GMU: Tensor, kept_GMU: Tensor) -> dict[str, Tensor]:
    """Return in how many buckets of a forward one modality was dropped before the other.

    ``wrong_modality``: a pair of the protected modality was lost and one of the other kept.
    ``spared``: pairs of that other one were lost and protected pairs kept. ``protected_lost``:
    protected pairs were lost, too. Without a priority there is nothing to count.

    Args:
        method: The method, whose ``modality`` names what is dropped first.
        lost_GMU: Pairs of tokens' own top-k that each unit did not compute.
        kept_GMU: All pairs that it did compute.
    """
    first = _FIRST.get(method.modality)
    if first is None:
        return {}
    protected_lost_GU = lost_GMU[:, 1 - first] > 0
    return {
        "wrong_modality": (protected_lost_GU & (kept_GMU[:, first] > 0)).sum(),
        "spared": ((lost_GMU[:, first] > 0) & (kept_GMU[:, 1 - first] > 0)).sum(),
        "protected_lost": protected_lost_GU.sum(),
    }


def modality_report(
    sums: Mapping[str, Tensor], peaks: Mapping[str, Sequence[Tensor]], top_k: int
) -> dict[str, Any]:
    """Return the statistics of each modality in a layer, JSON-ready; see ``docs/results.md``.

    Args:
        sums: The layer's ``modality_counts`` [C, M], the loads ``modality_before`` and
            ``modality_after`` [M, E], and ``band_counts`` [C, B].
        peaks: The highest load over the mean load [M] before and after, of each forward; NaN
            without a token.
        top_k: Experts K per token.
    """
    found = {}
    for number, name in enumerate(MODALITIES):
        counts = dict(zip(COUNTS, sums["modality_counts"][:, number].tolist(), strict=True))
        of_one = {when: torch.stack(list(peaks[when]))[:, number] for when in ("before", "after")}
        found[name] = {
            **counts,
            "drop_rate": counts["dropped"] / max(counts["tokens"] * top_k, 1),
            "load_before": sums["modality_before"][number].tolist(),
            "load_after": sums["modality_after"][number].tolist(),
            "peak": {when: summary(ratio[~ratio.isnan()]) for when, ratio in of_one.items()},
        }
    bands = dict(zip(COUNTS, sums["band_counts"].tolist(), strict=True))
    found["image"]["bands"] = {name: bands[name] for name in ("tokens", "dropped")}
    return found


def summary(values: Tensor) -> dict[str, float] | None:
    """Return mean, maximum and last of some values, rounded for figures; None without a value."""
    if not len(values):
        return None
    values = values.double()
    found = {"mean": values.mean(), "max": values.max(), "last": values[-1]}
    return {name: round(float(value), DIGITS) for name, value in found.items()}
