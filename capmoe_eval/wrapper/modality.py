"""Tell which tokens of a batch stand for an image, and which for text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.tokens import moved

# Shape suffixes: B sequences, S positions.

MODALITIES = ("text", "image")
"""The modalities in the order of their numbers. A video and sound count as images."""

BANDS = 8
"""Parts of equal size of an image's tokens, in their order: from its top to its bottom."""

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


def image_bands(image_BS: Tensor, row_end_BS: Tensor | None = None) -> Tensor:
    """Return the band of each image token, 0 to BANDS - 1, among those of its image [B, S].

    An image is a run of image tokens in a sequence, which the ends of its rows do not interrupt.
    The number of a token of text means nothing.
    """
    inside_BS = image_BS if row_end_BS is None else image_BS | row_end_BS
    before_BS = torch.nn.functional.pad(inside_BS, (1, 0))[:, :-1]
    flat_N = image_BS.reshape(-1)
    # From 1; of the image before or here.
    run_N = (inside_BS & ~before_BS).reshape(-1).cumsum(dim=0)
    length_R = torch.zeros(len(flat_N) + 1, dtype=torch.long, device=flat_N.device)
    length_R.scatter_add_(0, run_N, flat_N.long())
    image_tokens_N = flat_N.long().cumsum(dim=0)
    first_R = length_R.cumsum(dim=0) - length_R  # image tokens before each run
    place_N = image_tokens_N - 1 - first_R[run_N]
    band_N = place_N * BANDS // length_R[run_N].clamp_min(1)
    return band_N.clamp(0, BANDS - 1).view(image_BS.shape)


class ImageFinder:
    """Finds the image tokens of a model's forwards."""

    def __init__(self, model: Any) -> None:
        config = getattr(model, "config", None)
        self._ids = placeholder_ids(config)
        self._row_end: int | None = getattr(config, "image_row_end_id", None)  # MolmoE

    @property
    def knows_images(self) -> bool:
        """True if the model's configuration names a token that stands for an image."""
        return bool(self._ids)

    def find(
        self,
        arguments: Mapping[str, Any],
        tokens: Tensor,
        needed_by: str | None = None,
        *,
        prompt_length: int | None = None,
    ) -> Tensor | None:
        """Return a mask [B, S] of the image tokens of a forward; None where there can be none.

        They are told by ``mm_token_type_ids`` where the forward is given them, else by the ids of
        placeholders. ``tokens`` are its tokens or their embeddings [B, S, …]. From position
        ``prompt_length`` on tokens are generated, and text whatever their ids.

        Raises:
            UsageError: If the setting ``needed_by`` needs a mask that the arguments do not give.
        """
        types, ids = arguments.get(_TYPES), arguments.get("input_ids")
        image_BS = None
        if isinstance(types, Tensor) and types.shape == tokens.shape[:2]:
            image_BS = types != 0
        elif not self._ids:
            return None
        elif ids is not None:
            image_BS = torch.isin(ids, moved(torch.tensor(self._ids), ids.device))
        if image_BS is not None:
            image_BS[:, tokens.shape[1] if prompt_length is None else prompt_length :] = False
            return image_BS
        if needed_by is not None:
            raise UsageError(
                f"{needed_by}: the model is called with inputs_embeds, which do not say "
                f"where the images are; pass input_ids, or {_TYPES} as well"
            )
        return None

    def row_ends(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """Return a mask [B, S] of a forward's tokens behind rows of an image; None without any."""
        ids = arguments.get("input_ids")
        return None if self._row_end is None or ids is None else ids == self._row_end
