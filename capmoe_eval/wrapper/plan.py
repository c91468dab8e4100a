"""Plan one forward of the model: its call, counted tokens, images, groups and capacities."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from capmoe_eval.errors import UsageError
from capmoe_eval.routing import definition
from capmoe_eval.routing.decision import TokenGroups, group_tokens, moved
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.ranks import ALONE, Ranks

# Shape suffixes: B sequences, S new positions, N = B·S rows, T counted tokens, M columns of a mask
# over cache and new positions.

# The call of a forward: its tokens, its cache, and whether its rows are sequences.

_PACKED = (
    "sequences are packed into one row, whose ranks and groups cannot be told; call the model with "
    "a padded batch and its attention_mask"
)


def read_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a forward by name, and its tokens or their embeddings [B, S, …].

    Raises:
        UsageError: If the call has neither ``input_ids`` nor ``inputs_embeds``, or packs sequences.
    """
    arguments = dict(kwargs)
    if args:  # binding takes a while, and `generate` names all of them
        arguments = signature.bind_partial(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
    for name in ("cu_seq_lens_q", "seq_idx"):
        if arguments.get(name) is not None:
            raise UsageError(f"{name}: {_PACKED}")
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            return arguments, arguments[name]
    raise UsageError("model: call it with input_ids or inputs_embeds")


def check_unpacked(position_ids: Any, real_BS: Tensor | None) -> None:
    """Refuse ``position_ids`` by which one row holds several sequences (packing).

    It concerns calls without an ``attention_mask``. As in transformers, another sequence begins
    where a position is not its predecessor plus one. A model of images has positions [3, B, S]; the
    first, in time, stand still within an image and fall only where another sequence begins. Pads,
    which ``real_BS`` marks, begin no sequence.

    Raises:
        UsageError: If a row has several sequences.
    """
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1] < 2:
        return
    if position_ids.ndim == 3:
        begins_BS = position_ids[0].diff(dim=-1) < 0
    else:
        begins_BS = position_ids.diff(dim=-1) != 1
    if real_BS is not None:
        real_BS = real_BS.to(begins_BS.device).bool()
        begins_BS = begins_BS & real_BS[:, 1:] & real_BS[:, :-1]
    if bool(begins_BS.any()):
        raise UsageError(f"position_ids: do not count on within a row: {_PACKED}")


def caches(values: Any) -> dict[Any, Cache]:
    """Return the caches among the arguments or the outputs of a forward, by their names.

    They are known by their type, because a name depends on the version of transformers.
    """
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    return {name: value for name, value in items if isinstance(value, Cache)}


def cached_positions(arguments: Mapping[str, Any]) -> int:
    """Return how many positions the cache of a forward holds; 0 without a cache.

    Raises:
        UsageError: For a filled cache of another kind than transformers', and for several caches
            that differ.
    """
    for name, value in arguments.items():
        if _is_filled(name, value):
            raise UsageError(
                f"{name}: is a filled cache of a kind that transformers does not have "
                f"({type(value).__name__}), so that its positions cannot be told; pass a "
                "DynamicCache of transformers, or another Cache"
            )
    lengths = {name: int(cache.get_seq_length()) for name, cache in caches(arguments).items()}
    filled = {name: length for name, length in lengths.items() if length}
    if len(set(filled.values())) > 1:
        raise UsageError(
            f"{', '.join(filled)}: are caches of {', '.join(map(str, filled.values()))} positions, "
            "so that the sequences' own cannot be told; pass one cache"
        )
    return next(iter(filled.values()), 0)


def _is_filled(name: str, value: Any) -> bool:
    """Return whether an argument is a filled cache of a kind that transformers does not have."""
    if value is None or isinstance(value, (Cache, bool)):
        return False
    if hasattr(value, "get_seq_length"):
        return int(value.get_seq_length()) > 0
    if not isinstance(value, (tuple, list)):
        return name in ("cache", "past_key_values", "cache_params")  # its names so far
    layers = [layer for layer in value if isinstance(layer, (tuple, list)) and layer]
    return any(isinstance(layer[0], Tensor) and layer[0].ndim == 4 for layer in layers)


# Images.

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
    """Return the ids of the placeholder tokens of images, video and sound.

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


def find_images(
    config: Any,
    arguments: Mapping[str, Any],
    tokens: Tensor,
    needed_by: str | None = None,
    *,
    prompt_length: int | None = None,
) -> Tensor | None:
    """Return a mask [B, S] of the image tokens of a forward; None where there can be none.

    They are told by ``mm_token_type_ids`` where the forward is given them, else by the ids of
    placeholders. From position ``prompt_length`` on tokens are generated, and text whatever their
    ids.

    Args:
        config: The model's configuration.
        arguments: The arguments of the forward.
        tokens: Its tokens or their embeddings [B, S, …].
        needed_by: The setting that needs the mask, if one does.
        prompt_length: New tokens that are of the prompt; None for all.

    Raises:
        UsageError: If a setting needs a mask that the arguments do not give.
    """
    types, ids = arguments.get(_TYPES), arguments.get("input_ids")
    placeholders = placeholder_ids(config)
    if isinstance(types, Tensor) and types.shape == tokens.shape[:2]:
        image_BS = types != 0
    elif not placeholders:
        return None
    elif ids is not None:
        image_BS = torch.isin(ids, moved(torch.tensor(placeholders, device="cpu"), ids.device))
    elif needed_by is None:
        return None
    else:
        raise UsageError(
            f"{needed_by}: the model is called with inputs_embeds, which do not say "
            f"where the images are; pass input_ids, or {_TYPES} as well"
        )
    image_BS[:, tokens.shape[1] if prompt_length is None else prompt_length :] = False
    return image_BS


# Counted tokens, groups and capacities.

GAMMA_GRID: tuple[float, ...] = tuple(step / 4 for step in range(17))
"""γ = 0, 0.25, … 4, for which the meter counts drops beside the run's own γ (Figures 7, 17-20)."""


def new_columns(mask: Any, tokens: Tensor, n_cached: int) -> Tensor:
    """Return a boolean mask [B, S] of the new tokens that an attention mask [B, M] marks as real.

    As in transformers, column j of the mask is position j of a sequence, cached positions first.
    The mask may be longer than the cached and new tokens (a static cache), but not shorter.

    Raises:
        UsageError: If the mask is not a 2-dimensional tensor that covers the tokens.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UsageError(
            "attention_mask: a capacity needs the 2-dimensional mask to know the pads; pass that, "
            "or say them with meter.real_tokens(mask)"
        )
    n_sequences, n_new = tokens.shape[:2]
    end = n_cached + n_new
    if len(mask) != n_sequences or mask.shape[1] < end:
        raise UsageError(
            f"attention_mask: its shape {tuple(mask.shape)} does not cover {n_sequences} sequences "
            f"of {n_cached} cached and {n_new} new tokens; pass ({n_sequences}, {end})"
        )
    return mask[:, n_cached:end].bool()


class Tokens(NamedTuple):
    """The tokens of a forward on one device."""

    groups: TokenGroups
    pads_N1: Tensor  # True for a row that does not count, whatever the groups
    image_T: Tensor | None  # True for a token of an image; None where there can be none
    band_T: Tensor | None  # its part of the image, see :func:`image_bands`


@dataclass(eq=False)
class ForwardPlan:
    """The call of a forward, and its tokens, groups and capacities, shared by its layers."""

    method: Method
    _: KW_ONLY
    # The call, of which alone the definition makes what a plan has besides.
    number: int  # forwards of the model before this one
    n_sequences: int  # B
    n_new: int  # S
    prompt_length: int  # new tokens that are of the prompt; those after them were generated
    n_cached: int = 0
    mask_BM: Tensor | None = None  # real tokens; None if all are real
    first_column: int = 0  # of the mask that is of a new token
    # In a generation, whether the forward computes the prompt; None outside of any.
    is_prompt: bool | None = None
    is_idle: bool = False  # True for a process without a sequence of the batch
    config: Any = None  # of the model, which names the tokens that stand for images
    arguments: Mapping[str, Any] = field(default_factory=dict)  # by their names
    call_mask: Any = None  # the mask that the caller gave, as it is; None if there was none
    ranks: Ranks = ALONE
    # The plan.
    counted_BS: Tensor  # True for this process's tokens that count and take slots
    decode: bool  # a decode step
    image_BS: Tensor | None = None  # True for its tokens of images; None where there can be none
    thread: int = field(default_factory=threading.get_ident)  # that runs the forward
    # (layer, "router" or "experts") of each module that ran so far
    seen: list[tuple[int, str]] = field(default_factory=list)
    observers: Sequence[Any] = ()  # those that see its layers
    # The forwards of the layers whose router ran and whose experts are still to run.
    routed: dict[int, Any] = field(default_factory=dict)
    _on: dict[torch.device, Tokens] = field(default_factory=dict)
    _capacities: dict[object, Tensor] = field(default_factory=dict)

    @property
    def constrained(self) -> bool:
        """True if the forward is under the method."""
        return self.method.decode == "constrained" or self.decode == (self.method.decode == "only")

    @property
    def live(self) -> Tensor:
        """The number of this process's sequences with a token that counts []."""
        return self.counted_BS.any(dim=1).sum()

    @cached_property
    def groups(self) -> TokenGroups:
        """The capacity groups; a forward without a capacity needs none.

        Processes that share a model ask for them together.
        """
        counted_BS = self.counted_BS
        if self.ranks is ALONE:  # on the host, which waits once for a mask of the device
            counted_BS = counted_BS.cpu()
        tokens_B = counted_BS.sum(dim=1)
        share = self.ranks.share(tokens_B[:0] if self.ranks.idle else tokens_B)
        return group_tokens(
            counted_BS, ep_size=self.method.ep_size, scope=self.method.scope, share=share
        )

    def on(self, device: torch.device) -> Tokens:
        """Return the groups, the pads and the images on a device; they are moved once."""
        if device not in self._on:
            image_T = band_T = None
            if self.image_BS is not None:
                rows_T = moved(self.groups.rows_T, self.image_BS.device)
                row_end = getattr(self.config, "image_row_end_id", None)  # MolmoE
                ids_BS = self.arguments.get("input_ids")
                row_end_BS = None if row_end is None or ids_BS is None else ids_BS == row_end
                parts = (self.image_BS, image_bands(self.image_BS, row_end_BS))
                image_T, band_T = (part.reshape(-1)[rows_T].to(device) for part in parts)
            pads_N1 = moved(~self.counted_BS.reshape(-1, 1), device)
            self._on[device] = Tokens(self.groups.to(device), pads_N1, image_T, band_T)
        return self._on[device]

    def capacities(
        self, gammas: tuple[float, ...], layer: MoeLayer, device: torch.device
    ) -> Tensor:
        """Return the capacity of each group at each γ [Γ, G]; layers of the same sizes share them.

        It is the definition's: nothing decides by it.
        """
        sizes = {"top_k": layer.top_k, "n_experts": layer.n_experts}
        key = (gammas, *sizes.values(), device)
        if key not in self._capacities:
            tokens_G = np.array(self.groups.tokens)
            limit_XG = [definition.limits(self.method, of, tokens_G, **sizes) for of in gammas]
            self._capacities[key] = moved(torch.from_numpy(np.stack(limit_XG)), device)
        return self._capacities[key]
