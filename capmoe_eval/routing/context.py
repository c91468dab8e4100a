"""Define what a decision may know of its layer beside the scores and the groups of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capmoe_eval.routing.tokens import TokenGroups, moved

if TYPE_CHECKING:
    from capmoe_eval.routing.method import Method

# Shape suffixes: T counted tokens, E routed experts, H hidden size, G capacity groups.


def _same(count: Tensor) -> Tensor:
    return count


@dataclass(frozen=True)
class LayerContext:
    """One layer in one forward, as a decision sees it; on the device of the scores."""

    limit_G: Tensor | None = None  # C of a unit in each group; None without a capacity
    random_TE: Tensor | None = None  # of a method that draws numbers
    image_T: Tensor | None = None  # True for a token of an image; None where there are none
    hidden_TH: Tensor | None = None  # the router's input, for a method that reads it
    # What a calibration measured of the layer: the similarity of experts [E, E], the modality of
    # each [E], or the experts of each rank [R, E/R], rising.
    calibrated: Tensor | None = None
    # Sums whole numbers over the processes that share the batch.
    total: Callable[[Tensor], Tensor] = _same

    @classmethod
    def of(
        cls,
        method: Method,
        tokens: TokenGroups,
        *,
        top_k: int,
        n_experts: int,
        layer: int = 0,
        forward: int = 0,
        image_T: Tensor | None = None,
        hidden_TH: Tensor | None = None,
        calibrated: Tensor | None = None,
        total: Callable[[Tensor], Tensor] = _same,
        limit_G: Tensor | None = None,
    ) -> LayerContext:
        """Return the context of a layer's decision, with the capacities and random numbers.

        Args:
            method: The method, with the layer's own γ.
            tokens: The capacity groups, on the device of the scores.
            top_k: Experts K per token.
            n_experts: Routed experts E.
            layer: Number of the layer, which with that of the forward determines random numbers.
            forward: Number of the forward.
            image_T: True for the tokens of an image.
            hidden_TH: The router's input.
            calibrated: What a calibration measured of the layer.
            total: Sums over processes that share the batch.
            limit_G: The capacities, where they are at hand.
        """
        device = tokens.group_T.device
        if limit_G is None and method.factor is not None:
            limits = method.limits(tokens.tokens, top_k=top_k, n_experts=n_experts)
            limit_G = moved(torch.tensor(limits), device)
        random_TE = method.random_numbers(tokens, n_experts, layer, forward)
        return cls(
            limit_G,
            None if random_TE is None else moved(random_TE, device),
            image_T,
            hidden_TH,
            calibrated,
            total,
        )
