"""The calibration of MACS: how often the tokens of images and of text choose each expert.

It is measured once, and serves any threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record_part import Calibrated, Part, Share
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.weighted import modality_bias
from capmoe_eval.serving.calibration import Applied, Calibration, rounded_shares
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.recorder import Observer

# Shape suffixes: T counted tokens, K = top-k, E routed experts, M modalities, text before image.


class ModalityCounter(Observer):
    """Counts the choices of each expert by the tokens of text and of images."""

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        self.layers = layers
        self._chosen_ME = [torch.zeros(2, of.n_experts, dtype=torch.long) for of in layers]
        self._tokens_M = torch.zeros(2, dtype=torch.long)  # of the first layer, as of all

    def note(self, layer: int, plan: ForwardPlan, scores: Scores) -> None:
        """Count one forward of a layer."""
        topk_TK = scores.topk_TK
        image_T = plan.on(topk_TK.device).image_T
        image_T = torch.zeros_like(topk_TK[:, 0]) if image_T is None else image_T.long()
        n_experts = self.layers[layer].n_experts
        chosen_P = (image_T[:, None] * n_experts + topk_TK).reshape(-1)
        count_ME = torch.bincount(chosen_P, minlength=2 * n_experts).view(2, -1)
        self._chosen_ME[layer] += count_ME.cpu()
        if layer == 0:
            self._tokens_M += torch.bincount(image_T, minlength=2).cpu()

    def loads(self) -> list[Tensor]:
        """Return the number of tokens that choose each expert, by layer [E]."""
        return [chosen_ME.sum(dim=0) for chosen_ME in self._chosen_ME]

    def frequencies(self) -> list[Tensor]:
        """Return the share of each modality's tokens that choose each expert, by layer [M, E].

        Raises:
            UsageError: If there was no token of an image or none of text.
        """
        if not bool(self._tokens_M.all()):
            raise UsageError(
                f"{ExpertModalities.asked_by}: the calibration saw {int(self._tokens_M[1])} tokens "
                f"of images and {int(self._tokens_M[0])} of text, and needs both; choose another "
                "task, or set rho=0"
            )
        return [chosen_ME / self._tokens_M[:, None] for chosen_ME in self._chosen_ME]


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
    """The file of the experts' activation frequencies by modality."""

    asked_by: ClassVar[str] = "method=macs"
    knobs: ClassVar[tuple[str, ...]] = ("count_padding", "decode")
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_modalities"}

    layers: Annotated[list[LayerFrequencies], Field(min_length=1)]

    @classmethod
    def stem(cls, method: Method) -> str:
        """Return what the file has, which names it."""
        return "modalities"

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> ModalityCounter:
        """Return a counter of choices."""
        return ModalityCounter(layers)

    @classmethod
    def measured(cls, observer: ModalityCounter) -> dict[str, Any]:
        """Return the frequencies of every layer."""
        layers = [
            LayerFrequencies(
                name=layer.name,
                text=rounded_shares(text_E.tolist()),
                image=rounded_shares(image_E.tolist()),
            )
            for layer, (text_E, image_E) in zip(
                observer.layers, observer.frequencies(), strict=True
            )
        ]
        return {"layers": layers}

    def applied(self, method: Method, file: str) -> Applied:
        """Tell the modality of every expert, by the method's threshold."""
        modalities = tuple(
            modality_bias(
                torch.tensor(layer.image), torch.tensor(layer.text), method.modality_threshold
            )
            for layer in self.layers
        )
        return Applied(method, Calibrated(file=file, checksum=self.checksum), modalities)
