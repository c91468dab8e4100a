"""Compare the outputs of all experts of a layer on the same tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.observer import Observer

# Shape suffixes: N rows of the batch, T counted tokens, H hidden size, E experts.

_AT_ONCE = 256  # tokens that every expert computes in one call


class LayerOutputs:
    """The inner products of the outputs of one layer's experts."""

    def __init__(self, layer: MoeLayer) -> None:
        self.layer = layer
        self.tokens = 0  # taken so far
        self._waiting: list[Tensor] = []  # a decode step has few tokens
        self._products: Tensor | float = 0.0

    def take(self, hidden_TH: Tensor) -> None:
        """Take some tokens, and compare the experts when there are enough."""
        self.tokens += len(hidden_TH)
        self._waiting.append(hidden_TH.clone())
        if sum(map(len, self._waiting)) >= _AT_ONCE:
            self._compare()

    def similarity(self) -> Tensor:
        """Return the similarity of the experts [E, E], in float64."""
        if self._waiting:
            self._compare()
        return frobenius_similarity(torch.as_tensor(self._products))

    def _compare(self) -> None:
        """Add the inner products of the experts' outputs on the tokens that wait."""
        hidden_TH, self._waiting = torch.cat(self._waiting), []
        for some_TH in torch.split(hidden_TH, _AT_ONCE):
            output_ED = torch.stack(list(_outputs(self.layer, some_TH))).flatten(1)
            self._products = self._products + output_ED @ output_ED.T


class Similarities(Observer):
    """Sums over the first tokens of a run, from which the experts' distances follow.

    Every expert computes every token, one expert after the other, whatever the router chose.
    """

    sums: Sequence[LayerOutputs]

    def __init__(self, layers: Sequence[MoeLayer], limit: int) -> None:
        self.sums = [LayerOutputs(layer) for layer in layers]
        self._limit = limit

    @property
    def tokens(self) -> int:
        """The most tokens of a layer that were taken."""
        return max(layer.tokens for layer in self.sums)

    def see(self, event: LayerForward) -> None:
        """Take the counted tokens of a forward."""
        layer = self.sums[event.number]
        hidden_TH = event.counts.groups.counted(event.experts.hidden_NH.detach())
        layer.take(hidden_TH[: self._limit - layer.tokens])

    def similarities(self) -> list[Tensor]:
        """Return the similarity of the experts of every layer [E, E], in float64."""
        return [layer.similarity() for layer in self.sums]


def _outputs(layer: MoeLayer, hidden_TH: Tensor) -> Iterator[Tensor]:
    """Yield the output of each expert for all tokens [T, H], in float64."""
    experts = layer.experts
    weight_T1 = torch.ones(len(hidden_TH), 1, dtype=hidden_TH.dtype, device=hidden_TH.device)
    with torch.no_grad():
        for expert in range(layer.n_experts):
            index_T1 = torch.full_like(weight_T1, expert, dtype=torch.long)
            yield experts.forward(hidden_TH, index_T1, weight_T1).double()


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


def frobenius_similarity_reference(outputs: list[list[list[float]]]) -> list[list[float]]:
    """Define the similarity by loops, from the outputs of each expert for each token."""
    flat = [list(itertools.chain.from_iterable(tokens)) for tokens in outputs]
    distance = [[math.dist(one, two) for two in flat] for one in flat]
    largest = max(max(row) for row in distance) or 1.0
    return [[1 - value / largest for value in row] for row in distance]
