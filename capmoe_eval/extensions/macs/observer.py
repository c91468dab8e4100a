"""Check the bounds on weights under MACS, and add up the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from capmoe_eval.extensions.macs.decision import UNIT, Weighted
from capmoe_eval.routing.scores import bucket_loads
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.loads import bound_faults
from capmoe_eval.wrapper.observers.observer import CountingObserver

# Shape suffixes: T counted tokens, S slots of a token, E experts, G capacity groups.


class WeightBound(CountingObserver):
    """Checks that no expert is called with more weight than its capacity."""

    faults: ClassVar[Mapping[str, str]] = {
        "violations": "bound_holds (bound exceeded in {} buckets)",
        "unenforced": "overload_drops ({} overloads without a drop)",
    }

    def __init__(self, layers: Sequence[MoeLayer], calibrated: Sequence[Tensor] | None) -> None:
        super().__init__(len(layers))
        if calibrated is None:  # no expert is of a modality
            calibrated = [torch.zeros(layer.n_experts) for layer in layers]
        self._bias_E = torch.cat(list(calibrated))  # of the experts of all layers

    def see(self, event: LayerForward) -> None:
        """Check one forward of a layer."""
        counts, assignment = event.counts, event.assignment
        assert assignment is not None
        weighted: Weighted = assignment.details
        groups, shape, unit_T = counts.groups, counts.kept_GE.shape, weighted.unit_T
        is_called_TA = counts.index_TA < shape[1]
        demand_GE, called_GE = (
            bucket_loads(groups.group_T, index_TS.clamp_max(shape[1] - 1), amount_TS, shape)
            for index_TS, amount_TS in (
                (counts.topk_TK, unit_T[:, None].expand_as(counts.topk_TK)),
                (counts.index_TA, unit_T[:, None] * is_called_TA),
            )
        )
        limit_GE, image_T = weighted.limit_GE, counts.image_T
        is_image_T = torch.zeros_like(unit_T) if image_T is None else image_T.long()
        self.sums[event.number].add(
            **bound_faults(called_GE > limit_GE, (demand_GE > limit_GE).any(), counts.dropped),
            buckets=sum(tokens > 0 for tokens in groups.tokens) * shape[1],
            # The capacity of an expert of no modality, in pairs.
            beyond_base=(counts.kept_GE > event.limit_G[:, None]).sum(),
            units=unit_T.sum(),
            image_units=(unit_T * is_image_T).sum(),
            image_tokens=is_image_T.sum(),
        )

    def summary(self) -> dict[str, Any]:
        """Return the weights of tokens, and the modalities of the experts of all layers."""
        total = self.totals("buckets", "beyond_base", "units", "image_units", "image_tokens")
        of_images = UNIT * total["image_tokens"]
        kinds = {"visual": 1, "text": -1, "shared": 0}
        return {
            "weights": {
                "image": total["image_units"] / of_images if of_images else None,
                "visual_ratio": total["image_units"] / max(total["units"], 1),
                "beyond_base": total["beyond_base"] / max(total["buckets"], 1),
                "experts": {
                    name: int((self._bias_E == bias).sum()) for name, bias in kinds.items()
                },
            }
        }
