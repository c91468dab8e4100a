"""Count the weights that experts are sent under MACS, and compare them with their capacities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from capmoe_eval.routing.groups import TokenGroups
from capmoe_eval.routing.weighted import UNIT, Weighted, weighted_loads

# Shape suffixes: T counted tokens, K = top-k, S slots, E experts, G capacity groups.


def check_weights(
    weighted: Weighted,
    groups: TokenGroups,
    image_T: Tensor | None,
    *,
    topk_TK: Tensor,
    index_TS: Tensor,
    kept_GE: Tensor,
    base_G: Tensor,
    dropped: Tensor,
) -> dict[str, Tensor]:
    """Return what a forward broke of the bounds on weights, and its weights, as sums of a layer.

    Args:
        weighted: The weights of tokens, and the capacities of experts.
        groups: The capacity groups.
        image_T: True for a token of an image; None where there are none.
        topk_TK: The router's own choice.
        index_TS: The experts that were called; E marks a dropped slot.
        kept_GE: The number of computed pairs of each expert.
        base_G: The capacity that an expert has where every token weighs 1, whatever its modality.
        dropped: Number of lost pairs.
    """
    n_experts, unit_T = kept_GE.shape[1], weighted.unit_T
    own_GE, called_GE = (
        weighted_loads(groups, unit_T, index_TS, counts_TS, n_experts)
        for index_TS, counts_TS in (
            (topk_TK, torch.ones_like(topk_TK, dtype=torch.bool)),
            (index_TS.clamp_max(n_experts - 1), index_TS < n_experts),
        )
    )
    overloaded = (own_GE > weighted.limit_GE).any()
    if image_T is None:
        image_T = torch.zeros_like(unit_T, dtype=torch.bool)
    return {
        "violations": (called_GE > weighted.limit_GE).sum(),
        "overloaded": overloaded.long(),
        "unenforced": (overloaded & (dropped == 0)).long(),
        "beyond_base": (kept_GE > base_G[:, None]).sum(),
        "units": unit_T.sum(),
        "image_units": (unit_T * image_T).sum(),
        "image_tokens": image_T.sum(),
    }


WEIGHED = ("buckets", "beyond_base", "units", "image_units", "image_tokens")
"""The sums that :func:`weight_summary` reads."""


def weight_summary(total: Mapping[str, int], bias_E: Tensor) -> dict[str, object]:
    """Return the weights of a run, JSON-ready; see ``docs/results.md``.

    ``bias_E`` is the modality of the experts of all layers.
    """
    image = total["image_units"] / (UNIT * total["image_tokens"]) if total["image_tokens"] else None
    kinds = {"visual": 1, "text": -1, "shared": 0}
    return {
        "image": image,
        "visual_ratio": total["image_units"] / max(total["units"], 1),
        "beyond_base": total["beyond_base"] / max(total["buckets"], 1),
        "experts": {name: int((bias_E == bias).sum()) for name, bias in kinds.items()},
    }
