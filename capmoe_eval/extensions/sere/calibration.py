"""Compare the outputs of a layer's experts in the stock model, for SERE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record_part import Part, Positive, Share
from capmoe_eval.extensions.sere.similarity import Similarities
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.calibration import Calibration, Counted, rounded_shares
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffix: E routed experts.

TOKENS: Final = 12_800
"""The most tokens on which experts are compared: 200 sequences of 64, as in SERE's script."""


class LayerSimilarity(Part):
    """One layer's similarities of two experts each."""

    name: str
    n_experts: Positive
    # Of the experts (0, 1), (0, 2), … (1, 2), …: that of two experts has no order.
    similarity: list[Share]

    @model_validator(mode="after")
    def _one_for_each_pair(self) -> LayerSimilarity:
        pairs = self.n_experts * (self.n_experts - 1) // 2
        if len(self.similarity) != pairs:
            raise ValueError(f"{self.name} has {len(self.similarity)} similarities, not {pairs}")
        return self

    def matrix(self) -> Tensor:
        """Return the similarity of all experts [E, E]; that of an expert to itself is 1."""
        similarity_EE = torch.eye(self.n_experts)
        row, column = torch.triu_indices(self.n_experts, self.n_experts, offset=1)
        similarity_EE[row, column] = similarity_EE[column, row] = torch.tensor(self.similarity)
        return similarity_EE


class ExpertSimilarity(Calibration):
    """The similarity of the outputs of a layer's experts, for ``method=sere``."""

    asked_by: ClassVar[str] = "method=sere"
    stem: ClassVar[str] = "similarity"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_similarity", "compared": TOKENS}

    compared: Positive  # tokens of each layer
    layers: Annotated[list[LayerSimilarity], Field(min_length=1)]

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
        """Return the similarities of every layer."""
        similarities = []
        for outputs, similarity_EE in zip(observer.sums, observer.similarities(), strict=True):
            layer = outputs.layer
            row, column = torch.triu_indices(layer.n_experts, layer.n_experts, offset=1)
            pairs = rounded_shares(similarity_EE.cpu()[row, column].tolist())
            similarities.append(
                LayerSimilarity(name=layer.name, n_experts=layer.n_experts, similarity=pairs)
            )
        return {"compared": observer.tokens, "layers": similarities}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the similarities of every layer's experts [E, E]."""
        return tuple(layer.matrix() for layer in self.layers)
