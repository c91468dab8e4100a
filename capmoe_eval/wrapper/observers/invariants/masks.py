"""Define which tokens of a forward count, and which are of an image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from capmoe_eval.wrapper.plan import ForwardStart

# Shape suffixes: B sequences, S positions, N = B·S rows.

Array = npt.NDArray[Any]
_KINDS = ("image", "video", "audio")  # whose placeholders a configuration may name


def as_array(tensor: Tensor) -> Array:
    """Return a tensor in host memory."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def counted_tokens(start: ForwardStart, *, count_padding: bool) -> Array:
    """Return a mask of the tokens of the flattened batch that count in T and take slots [N]."""
    shape = (start.n_sequences, start.n_new)
    if start.mask_BM is None or count_padding:
        is_counted_BS = np.ones(shape, dtype=bool)
    else:
        last = start.first_column + start.n_new
        is_counted_BS = as_array(start.mask_BM)[:, start.first_column : last] != 0
    is_counted_N: Array = is_counted_BS.reshape(-1) & (not start.is_idle)
    return is_counted_N


def image_tokens(start: ForwardStart) -> Array | None:
    """Return a mask of the tokens of images in the flattened batch [N]; None if nothing tells.

    They are told by the types of tokens, else by the ids that the configuration names. Generated
    tokens are text.
    """
    types_BS, ids_BS = start.token_types_BS, start.input_ids_BS
    shape = (start.n_sequences, start.n_new)
    if types_BS is not None and types_BS.shape == shape:
        is_image_BS = as_array(types_BS) != 0
    elif ids_BS is not None:
        names = (f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))
        ids = {getattr(start.config, name, None) for name in names}
        is_image_BS = np.isin(as_array(ids_BS), [i for i in ids if isinstance(i, int)])
    else:
        return None
    is_image_BS[:, start.prompt_length :] = False
    return np.ravel(is_image_BS)
