"""Measure for MACS: the experts' modalities before a run, and the weights of tokens in it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import bucket_loads
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.observers.loads import bound_faults
from torch import Tensor

from capmoe_methods.calibration import Calibration, Counted, rounded_shares
from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import UNIT, modality_bias

# Shape suffixes: T counted tokens, S slots of a token, E experts, G capacity groups.


class ExpertModalities(Calibration):
    """The shares of image tokens and of text tokens that choose each expert, for MACS.

    It serves any threshold.
    """

    asked_by: ClassVar[str] = "method=macs"
    stem: ClassVar[str] = "modalities"
    constants: ClassVar[dict[str, Any]] = {"kind": "expert_modalities"}

    @classmethod
    def measured(cls, observer: Observer, layers: Counted) -> dict[str, Any]:
        """Return the shares of the tokens of images, and of text, that choose each expert [E].

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
            shares = {
                name: rounded_shares(
                    (torch.tensor(count["load_before"]) / torch.tensor(count["tokens"])).tolist()
                )
                for name, count in (("image", image), ("text", text))
            }
            frequencies.append({"name": layer["name"], **shares})
        return {"layers": frequencies}

    def needed(self, method: Method) -> tuple[Tensor, ...]:
        """Return the modality of every expert [E] by the method's threshold, for every layer."""
        assert isinstance(method, MACS)
        least = method.modality_threshold
        image, text = ([torch.tensor(of[kind]) for of in self.layers] for kind in ("image", "text"))
        pairs = zip(image, text, strict=True)
        return tuple(modality_bias(visual_E, text_E, least) for visual_E, text_E in pairs)


class WeightBound(Observer):
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
        assignment = event.assignment
        assert assignment is not None
        groups, shape, (unit_T, limit_GE) = event.groups, event.kept_GE.shape, assignment.details
        is_called_TA = event.index_TA < shape[1]
        demand_GE, called_GE = (
            bucket_loads(groups.group_T, index_TS.clamp_max(shape[1] - 1), amount_TS, shape)
            for index_TS, amount_TS in (
                (event.topk_TK, unit_T[:, None].expand_as(event.topk_TK)),
                (event.index_TA, unit_T[:, None] * is_called_TA),
            )
        )
        image_T = event.image_T
        is_image_T = torch.zeros_like(unit_T) if image_T is None else image_T.long()
        self.sums[event.number].add(
            **bound_faults(called_GE > limit_GE, (demand_GE > limit_GE).any(), event.dropped),
            buckets=sum(tokens > 0 for tokens in groups.tokens) * shape[1],
            # The capacity of an expert of no modality, in pairs.
            beyond_base=(event.kept_GE > event.limit_G[:, None]).sum(),
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
