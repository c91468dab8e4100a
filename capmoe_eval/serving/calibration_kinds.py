"""The kinds of calibration, by the name that a method has for the one it needs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record_part import Amount, ChosenFactors, Count, Part, Positive, Share
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.adaptive import choose, grid
from capmoe_eval.serving.calibration import Applied, Calibration, Counted, rounded_shares
from capmoe_eval.serving.placement.eplb import plan_eplb
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.curves import Curves
from capmoe_eval.wrapper.observers.observer import Observer
from capmoe_eval.wrapper.observers.similarity import Similarities
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: L layers, E routed experts, X capacity factors.

TOKENS: Final = 12_800
"""The most tokens on which experts are compared: 200 sequences of 64, as in SERE's script."""
_CURVES: Final = ("dropped", "dropped_scores", "straggler")


class LayerCurve(Part):
    """One layer at each capacity factor; see :class:`capmoe_eval.wrapper.observers.curves.Curve`."""

    name: str
    dropped: list[Share]
    dropped_scores: list[Share]
    straggler: list[Amount]


class FactorCurves(Calibration):
    """The effect of every capacity factor on a model's layers, for ``gamma=adaptive``.

    It serves any budget.
    """

    asked_by: ClassVar[str] = "gamma=adaptive"
    stem: ClassVar[str] = "ep{0.ep_size}"
    constants: ClassVar[dict[str, Any]] = {}
    knobs: ClassVar[tuple[str, ...]] = (
        *("ep_size", "scope", "granularity", "rounding", "count_padding", "decode"),
    )

    gammas: Annotated[list[Amount], Field(min_length=1)]
    layers: Annotated[list[LayerCurve], Field(min_length=1)]

    @model_validator(mode="after")
    def _as_long(self) -> FactorCurves:
        for layer in self.layers:
            for name in _CURVES:
                if len(getattr(layer, name)) != len(self.gammas):
                    raise ValueError(f"{layer.name}.{name} is not as long as gammas")
        return self

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Curves:
        """Return a meter of a grid of factors, up to one at which nothing binds."""
        top = max(of.n_experts / of.top_k for of in layers)
        # No capacity binds at E/K of an expert's, R of a device's.
        never_binds = float(method.ep_size) if method.granularity == "device" else top
        return Curves(layers, method, grid(never_binds))

    @classmethod
    def measured(cls, observer: Curves, layers: Counted) -> dict[str, Any]:
        """Return the factors, and the curves of every layer."""
        curves = [
            LayerCurve(
                name=curve.name,
                dropped=rounded_shares(curve.dropped_X),
                dropped_scores=rounded_shares(curve.dropped_scores_X),
                straggler=[round(value, 6) for value in curve.straggler_X],
            )
            for curve in observer.curves()
        ]
        return {"gammas": list(observer.gammas), "layers": curves}

    def applied(self, method: Method, file: str) -> Applied:
        """Choose the γ of every layer for a method with a budget."""
        rule = method.identity()
        dropped_LX, dropped_scores_LX, straggler_LX = curves = [
            np.array([getattr(layer, name) for layer in self.layers]) for name in _CURVES
        ]
        priced_LX = dropped_LX if rule["budget_of"] == "pairs" else dropped_scores_LX
        chosen = choose(priced_LX, straggler_LX, rule["budget"])
        gammas = [self.gammas[x] for x in chosen]
        drop_rate, dropped_scores, straggler = (
            fmean(curve_LX[np.arange(len(chosen)), chosen]) for curve_LX in curves
        )
        found = ChosenFactors(
            file=file,
            checksum=self.checksum,
            gammas=gammas,
            drop_rate=drop_rate,
            dropped_scores=dropped_scores,
            straggler=straggler,
        )
        return Applied(method.at(tuple(gammas)), found)


class LayerFrequencies(Part):
    """The share of the tokens of images, and of text, that choose each expert of a layer [E]."""

    name: str
    image: list[Share]
    text: list[Share]

    @model_validator(mode="after")
    def _as_long(self) -> LayerFrequencies:
        if len(self.image) != len(self.text):
            raise ValueError(f"{self.name}: image and text are not of one length")
        return self


class ExpertModalities(Calibration):
    """The shares of image tokens and of text tokens that choose each expert, for MACS.

    It serves any threshold.
    """

    asked_by: ClassVar[str] = "method=macs"
    stem: ClassVar[str] = "modalities"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_modalities"}

    layers: Annotated[list[LayerFrequencies], Field(min_length=1)]

    @classmethod
    def measured(cls, observer: Observer, layers: Counted) -> dict[str, Any]:
        """Return the frequencies of every layer.

        Raises:
            UsageError: If there was no token of an image or none of text.
        """
        frequencies = []
        for layer in layers:
            counts = layer.get("modalities") or {"text": layer, "image": {"tokens": 0}}
            image, text = counts["image"], counts["text"]
            if not image["tokens"] or not text["tokens"]:
                raise UsageError(
                    f"{cls.asked_by}: the calibration saw {image['tokens']} tokens of images and "
                    f"{text['tokens']} of text, and needs both; choose another task, or set rho=0"
                )
            image_E, text_E = (
                torch.tensor(count["load_before"]) / torch.tensor(count["tokens"])
                for count in (image, text)
            )
            frequencies.append(
                LayerFrequencies(
                    name=layer["name"],
                    image=rounded_shares(image_E.tolist()),
                    text=rounded_shares(text_E.tolist()),
                )
            )
        return {"layers": frequencies}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the modality of every expert [E] by the method's threshold, for every layer."""
        from capmoe_eval.extensions.macs.decision import modality_bias

        least = method.setting("modality_threshold")
        return tuple(
            modality_bias(torch.tensor(layer.image), torch.tensor(layer.text), least)
            for layer in self.layers
        )


class LayerLoads(Part):
    """The number of tokens that choose each expert of a layer [E]."""

    name: str
    loads: Annotated[list[Count], Field(min_length=1)]


class ExpertLoads(Calibration):
    """The tokens that choose each expert, for ``placement=eplb``; it serves any number of ranks."""

    asked_by: ClassVar[str] = "placement=eplb"
    stem: ClassVar[str] = "loads"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_loads"}

    layers: Annotated[list[LayerLoads], Field(min_length=1)]

    @classmethod
    def measured(cls, observer: Observer, layers: Counted) -> dict[str, Any]:
        """Return the loads of every layer."""
        nothing = [0] * layers[0]["n_experts"]
        loads = [(layer["name"], layer["load_before"] or nothing) for layer in layers]
        return {"layers": [LayerLoads(name=name, loads=load) for name, load in loads]}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the experts of each rank [R, E/R], for every layer."""
        return tuple(experts_of_ranks(layer.loads, method.ep_size) for layer in self.layers)


def experts_of_ranks(loads: Sequence[int], ranks: int) -> Tensor:
    """Return the experts of each rank [R, E/R], rising, as EPLB spreads them without copies.

    Raises:
        UsageError: If there is no load, or the experts cannot be spread evenly.
    """
    local = experts_per_rank(len(loads), ranks)
    if not any(loads):
        raise UsageError(
            f"{ExpertLoads.asked_by}: the calibration saw no token under the method; choose a task "
            "with such tokens, or decode=unconstrained"
        )
    placement = plan_eplb([loads], ranks, local)
    return torch.from_numpy(placement.expert_LRN[0]).sort(dim=1).values


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
    """The similarity of the outputs of a layer's experts, for ``method=sere``."""

    asked_by: ClassVar[str] = "method=sere"
    stem: ClassVar[str] = "similarity"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_similarity", "compared": TOKENS}

    compared: Positive  # tokens of each layer
    layers: Annotated[list[LayerSimilarity], Field(min_length=1)]

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Similarities:
        """Return a meter of all experts' outputs.

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
            one, other = torch.triu_indices(layer.n_experts, layer.n_experts, offset=1)
            pairs = rounded_shares(similarity_EE.cpu()[one, other].tolist())
            similarities.append(
                LayerSimilarity(name=layer.name, n_experts=layer.n_experts, similarity=pairs)
            )
        return {"compared": observer.tokens, "layers": similarities}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the similarities of every layer's experts [E, E]."""
        return tuple(layer.matrix() for layer in self.layers)


KINDS: Final[dict[str, type[Calibration]]] = {
    "expert_loads": ExpertLoads,
    "expert_modalities": ExpertModalities,
    "factor_curves": FactorCurves,
    "expert_similarity": ExpertSimilarity,
}
"""Each kind, by :attr:`capmoe_eval.routing.method.Method.calibration`."""


def kind_of(method: Method) -> type[Calibration] | None:
    """Return the kind of calibration that a method needs, or None."""
    return None if method.calibration is None else KINDS[method.calibration]
