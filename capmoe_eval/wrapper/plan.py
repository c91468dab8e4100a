"""Plan one forward of the model: its call, counted tokens, capacity groups and capacities."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.tokens import TokenGroups, group_tokens, moved
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.modality import image_bands
from capmoe_eval.wrapper.ranks import ALONE, Ranks

# Shape suffixes: B sequences, S new positions, N = B·S rows, T counted tokens, M columns of a mask
# over cache and new positions.

GAMMA_GRID: tuple[float, ...] = tuple(step / 4 for step in range(17))
"""γ = 0, 0.25, … 4, for which the meter counts drops beside the run's own γ (Figures 7, 17-20)."""


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
    if arguments.get("cu_seq_lens_q") is not None:
        raise UsageError(
            "cu_seq_lens_q: sequences are packed into one row, whose ranks and groups cannot be "
            "told; call the model with a padded batch and its attention_mask"
        )
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            return arguments, arguments[name]
    raise UsageError("model: call it with input_ids or inputs_embeds")


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


@dataclass(frozen=True)
class ForwardStart:
    """The call of a forward of the model."""

    number: int  # forwards of the model before this one
    mask_BM: Tensor | None  # real tokens; None if all are real
    first_column: int  # of the mask that is of a new token
    n_sequences: int  # B
    n_new: int  # S
    n_cached: int
    # In a generation, whether the forward computes the prompt; None outside of any.
    is_prompt: bool | None
    is_idle: bool  # True for a process without a sequence of the batch
    config: Any  # of the model, which names the tokens that stand for images
    input_ids_BS: Tensor | None
    token_types_BS: Tensor | None  # 0 for text
    prompt_length: int  # new tokens that are of the prompt; those after them were generated


@dataclass(eq=False)
class ForwardPlan:
    """The tokens, groups and capacities of one forward, shared by its layers."""

    method: Method
    number: int  # forwards before this one
    _: KW_ONLY
    counted_BS: Tensor  # True for this process's tokens that count and take slots
    decode: bool  # a decode step
    image_BS: Tensor | None = None  # True for its tokens of images; None where there can be none
    row_end_BS: Tensor | None = None  # True for its tokens of text between the rows of an image
    ranks: Ranks = ALONE
    thread: int = field(default_factory=threading.get_ident)  # that runs the forward
    # (layer, "router" or "experts") of each module that ran so far
    seen: list[tuple[int, str]] = field(default_factory=list)
    choices: dict[int, Tensor] = field(default_factory=dict)  # counted tokens' top-k, by layer
    start: ForwardStart | None = None  # its call; None in tests of the capacities alone
    observers: Sequence[Any] = ()  # those that see its layers
    routed: dict[int, Any] = field(default_factory=dict)  # layers whose experts are still to run
    _on: dict[torch.device, Tokens] = field(default_factory=dict)
    _capacities: dict[object, Tensor] = field(default_factory=dict)

    @property
    def constrained(self) -> bool:
        """True if the forward is under the method."""
        return self.method.decode == "constrained" or self.decode == (self.method.decode == "only")

    @cached_property
    def groups(self) -> TokenGroups:
        """The capacity groups; a forward without a capacity needs none.

        Processes that share a model ask for them together.
        """
        counted_BS = self.counted_BS
        if self.ranks is ALONE:  # on the host, which waits once for a mask of the device
            counted_BS = counted_BS.cpu()
        own_B = counted_BS.sum(dim=1)
        share = self.ranks.share(own_B[:0] if self.ranks.idle else own_B)
        return group_tokens(
            counted_BS, ep_size=self.method.ep_size, scope=self.method.scope, share=share
        )

    def on(self, device: torch.device) -> Tokens:
        """Return the groups, the pads and the images on a device; they are moved once."""
        if device not in self._on:
            image_T = band_T = None
            if self.image_BS is not None:
                rows_T = moved(self.groups.rows_T, self.image_BS.device)
                parts = (self.image_BS, image_bands(self.image_BS, self.row_end_BS))
                image_T, band_T = (part.reshape(-1)[rows_T].to(device) for part in parts)
            pads_N1 = moved(~self.counted_BS.reshape(-1, 1), device)
            self._on[device] = Tokens(self.groups.to(device), pads_N1, image_T, band_T)
        return self._on[device]

    def capacities(
        self, gammas: tuple[float, ...], layer: MoeLayer, device: torch.device
    ) -> Tensor:
        """Return the capacity of each group at each γ [Γ, G]; computed once for like layers."""
        sizes = {"top_k": layer.top_k, "n_experts": layer.n_experts}
        key = (gammas, *sizes.values(), device)
        if key not in self._capacities:
            tokens = self.groups.tokens
            limits = [self.method.limits(tokens, gamma=gamma, **sizes) for gamma in gammas]
            self._capacities[key] = moved(torch.tensor(limits), device)
        return self._capacities[key]

    def limit_G(self, method: Method, layer: MoeLayer, device: torch.device) -> Tensor | None:
        """Return the capacity of each group [G] at the γ of a layer's method; None without."""
        if method.factor is None:
            return None
        assert method.factor.uniform is not None
        return self.capacities((method.factor.uniform,), layer, device)[0]
