"""Tell which tokens of a batch stand for an image, and which for text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.errors import UsageError

# Shape suffixes: B sequences, S positions.

MODALITIES = ("text", "image")
"""The modalities in the order of their numbers. A video and sound count as images."""

_TYPES = "mm_token_type_ids"  # of a forward: 0 text, 1 image, 2 video, 3 sound
# The fields of a configuration with the id of the token that stands for a piece of an image.
_FIELDS = tuple(
    f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index")
)


def placeholder_ids(config: Any) -> list[int]:
    """Return the ids of the tokens in whose places a model computes images, video or sound.

    They are those that its configuration names, and none for a model of text.
    """
    named = {getattr(config, field, None) for field in _FIELDS}
    return sorted(number for number in named if isinstance(number, int))


class ImageFinder:
    """Finds the image tokens of a model's forwards."""

    def __init__(self, model: Any) -> None:
        self._ids = placeholder_ids(getattr(model, "config", None))

    def find(self, arguments: Mapping[str, Any], tokens: Tensor, modality: str) -> Tensor | None:
        """Return a mask [B, S] of the image tokens of a forward; None where there can be none.

        They are told by ``mm_token_type_ids`` where the forward is given them, else by the ids of
        placeholders. ``tokens`` are its tokens or their embeddings [B, S, …].

        Raises:
            UsageError: If a priority ``modality`` needs a mask that the arguments do not give.
        """
        types, ids = arguments.get(_TYPES), arguments.get("input_ids")
        if isinstance(types, Tensor) and types.shape == tokens.shape[:2]:
            return types != 0
        if not self._ids:
            return None
        if ids is not None:
            return torch.isin(ids, torch.tensor(self._ids, device=ids.device))
        if modality != "uniform":
            raise UsageError(
                f"modality={modality}: the model is called with inputs_embeds, which do not say "
                f"where the images are; pass input_ids, or {_TYPES} as well"
            )
        return None
