"""Measure how often image tokens and text tokens choose each expert, for MACS."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record_part import Part, Share
from capmoe_eval.extensions.macs.decision import modality_bias
from capmoe_eval.extensions.macs.method import MACS
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.calibration import Calibration, Counted, rounded_shares
from capmoe_eval.wrapper.observers.observer import Observer

# Shape suffix: E routed experts.


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
        assert isinstance(method, MACS)
        return tuple(
            modality_bias(
                torch.tensor(layer.image), torch.tensor(layer.text), method.modality_threshold
            )
            for layer in self.layers
        )
