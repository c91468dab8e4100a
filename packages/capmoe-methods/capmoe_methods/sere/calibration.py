"""Compare the outputs of a layer's experts in the stock model, for SERE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Positive
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.ranks import ALONE
from torch import Tensor

from capmoe_methods.calibration import Calibration, Counted, rounded_shares

# Shape suffixes: N rows of the batch, T counted tokens, H hidden size, E experts, D = T·H.

TOKENS: Final = 12_800
"""The most tokens on which experts are compared: 200 sequences of 64, as in SERE's script."""
_AT_ONCE = 256  # tokens that every expert computes in one call


class ExpertSimilarity(Calibration):
    """The similarity of the outputs of a layer's experts, for ``method=sere``."""

    asked_by: ClassVar[str] = "method=sere"
    stem: ClassVar[str] = "similarity"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_similarity", "compared": TOKENS}

    compared: Positive  # tokens of each layer

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Similarities:
        """Return an observer of all experts' outputs.

        Raises:
            UsageError: If the experts are spread over processes.
        """
        if layers[0].ranks is not ALONE:
            raise UsageError(
                "parallel=ep: method=sere first compares the outputs of all experts, which are "
                "spread over processes here; run one such cell without parallel=ep before"
            )
        return Similarities(layers, TOKENS)

    @classmethod
    def measured(cls, observer: Similarities, layers: Counted) -> dict[str, Any]:
        """Return the similarities of every layer: of the experts (0, 1), (0, 2), … (1, 2), …."""
        similarities = []
        for layer, similarity_EE in zip(observer.layers, observer.similarities(), strict=True):
            row, column = torch.triu_indices(layer.n_experts, layer.n_experts, offset=1)
            pairs = rounded_shares(similarity_EE.cpu()[row, column].tolist())
            about = {"name": layer.name, "n_experts": layer.n_experts}
            similarities.append(about | {"similarity": pairs})
        compared = max(sums.count("tokens") for sums in observer.sums)
        return {"compared": compared, "layers": similarities}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the similarity of every two experts of every layer [E, E]; to itself it is 1."""
        similarities = []
        for layer in self.layers:
            n_experts = layer["n_experts"]
            similarity_EE = torch.eye(n_experts)
            row, column = torch.triu_indices(n_experts, n_experts, offset=1)
            similarity_EE[row, column] = torch.tensor(layer["similarity"])
            similarities.append(similarity_EE.maximum(similarity_EE.T))
        return tuple(similarities)


class Similarities(Observer):
    """Sums over the first tokens of a run, from which the experts' distances follow.

    Every expert computes every token, one expert after the other, whatever the router chose.
    """

    def __init__(self, layers: Sequence[MoeLayer], limit: int) -> None:
        super().__init__(len(layers))
        self.layers, self._limit = layers, limit

    def see(self, event: LayerForward) -> None:
        """Add the inner products of the experts' outputs on the counted tokens of a forward."""
        sums, layer = self.sums[event.number], self.layers[event.number]
        hidden_TH = event.groups.counted(event.experts_hidden_NH.detach())
        hidden_TH = hidden_TH[: self._limit - sums.count("tokens")]
        for some_TH in torch.split(hidden_TH, _AT_ONCE):
            if len(some_TH):
                output_ED = torch.stack(list(_outputs(layer, some_TH))).flatten(1)
                sums.add(tokens=len(some_TH), products=output_ED @ output_ED.T)

    def similarities(self) -> list[Tensor]:
        """Return the similarity of the experts of every layer [E, E], in float64."""
        return [frobenius_similarity(sums.tensor("products")) for sums in self.sums]


def _outputs(layer: MoeLayer, hidden_TH: Tensor) -> Iterator[Tensor]:
    """Yield the output of each expert for all tokens [T, H], in float64."""
    weight_T1 = torch.ones(len(hidden_TH), 1, dtype=hidden_TH.dtype, device=hidden_TH.device)
    with torch.no_grad():
        for expert in range(layer.n_experts):
            index_T1 = torch.full_like(weight_T1, expert, dtype=torch.long)
            yield layer.experts.forward(hidden_TH, index_T1, weight_T1).double()


def frobenius_similarity(product_EE: Tensor) -> Tensor:
    """Return one less the distance of each two experts over the largest such distance [E, E].

    The distance is the Frobenius norm of the difference of their outputs on all tokens, as in
    SERE's released code (``frobenius_similarity_matrix_gpu`` of calibration/utils.py).

    Args:
        product_EE: Inner products of the experts' outputs, each flattened over tokens, in float64.
    """
    square_E = product_EE.diagonal()
    squares_EE = square_E[:, None] + square_E - 2 * product_EE
    distance_EE = squares_EE.clamp_min(0).sqrt().fill_diagonal_(0)
    largest = distance_EE.max()
    return 1 - distance_EE / torch.where(largest > 0, largest, torch.ones_like(largest))
