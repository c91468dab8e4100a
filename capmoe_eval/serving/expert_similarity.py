"""The calibration of ``method=sere``: how similar the outputs of a layer's experts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record_part import Calibrated, Part, Positive, Share
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.calibration import Applied, Calibration, rounded_shares
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.ranks import ALONE
from capmoe_eval.wrapper.similarity_meter import SimilarityMeter

TOKENS: Final = 12_800
"""The most tokens on which experts are compared: 200 sequences of 64, as in the released script."""


class LayerSimilarity(Part):
    """One layer's similarities of two experts each."""

    name: str
    n_experts: Positive
    # Of the experts (0, 1), (0, 2), … (1, 2), …: that of two experts has no order.
    similarity: list[Share]

    @model_validator(mode="after")
    def _one_for_each_pair(self) -> LayerSimilarity:
        wanted = self.n_experts * (self.n_experts - 1) // 2
        if len(self.similarity) != wanted:
            raise ValueError(f"{self.name} has {len(self.similarity)} similarities, not {wanted}")
        return self

    def matrix(self) -> Tensor:
        """Return the similarity of all experts [E, E]; that of an expert to itself is 1."""
        similarity_EE = torch.eye(self.n_experts)
        one, other = torch.triu_indices(self.n_experts, self.n_experts, offset=1)
        similarity_EE[one, other] = similarity_EE[other, one] = torch.tensor(self.similarity)
        return similarity_EE


class ExpertSimilarity(Calibration):
    """The file of the experts' similarities."""

    asked_by: ClassVar[str] = "method=sere"
    knobs: ClassVar[tuple[str, ...]] = ("count_padding", "decode")
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_similarity", "compared": TOKENS}

    compared: Positive  # tokens of each layer
    layers: Annotated[list[LayerSimilarity], Field(min_length=1)]

    @classmethod
    def stem(cls, method: Method) -> str:
        """Return the name of this kind: its files depend on no ranks."""
        return "similarity"

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> SimilarityMeter:
        """Return a meter of all experts' outputs.

        Raises:
            UsageError: If the experts are spread over processes.
        """
        if layers[0].ranks is not ALONE:
            raise UsageError(
                "parallel=ep: method=sere first compares the outputs of all experts, which are "
                "spread over processes here; run one such cell without parallel=ep before"
            )
        return SimilarityMeter(layers, TOKENS)

    @classmethod
    def measured(cls, observer: SimilarityMeter) -> dict[str, Any]:
        """Return the similarities of every layer."""
        layers = []
        for layer, similarity_EE in zip(observer.layers, observer.similarities(), strict=True):
            one, other = torch.triu_indices(layer.n_experts, layer.n_experts, offset=1)
            pairs = rounded_shares(similarity_EE.cpu()[one, other].tolist())
            layers.append(
                LayerSimilarity(name=layer.name, n_experts=layer.n_experts, similarity=pairs)
            )
        return {"compared": max(observer.tokens), "layers": layers}

    def applied(self, method: Method, file: str) -> Applied:
        """Return the method with the similarities of every layer."""
        matrices = tuple(layer.matrix() for layer in self.layers)
        return Applied(method, Calibrated(file=file, checksum=self.checksum), matrices)
