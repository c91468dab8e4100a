"""One MoE layer of any size with random weights, and what a rank does with its tokens in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from capmoe_eval.method import Method
from capmoe_eval.parallel.dispatch import Packed, combine_rows, pack
from capmoe_eval.routing import (
    BatchShare,
    Scores,
    TokenGroups,
    assign,
    expert_load,
    experts_per_rank,
    group_tokens,
)

# Shape suffixes: T tokens of a rank, E experts, K = top-k, S slots, H hidden size, P kept pairs.

Lap = Callable[[str], AbstractContextManager[None]]
"""Times the block under a phase's name."""


@dataclass(frozen=True)
class LayerShape:
    """The sizes of an MoE layer.

    Attributes:
        hidden: Hidden size H.
        intermediate: Width of an expert.
        n_experts: Routed experts E.
        top_k: Experts K per token.
    """

    hidden: int
    intermediate: int
    n_experts: int
    top_k: int


SHAPES = {
    "olmoe": LayerShape(2048, 1024, 64, 8),
    "qwen1_5_moe": LayerShape(2048, 1408, 60, 4),
    "deepseek_v2_lite": LayerShape(2048, 1408, 64, 6),
    "mixtral": LayerShape(4096, 14336, 8, 2),
    "qwen3_30b": LayerShape(2048, 768, 128, 8),
    "small": LayerShape(256, 256, 64, 8),
    "small_mixtral": LayerShape(256, 896, 8, 2),
}
"""The routed parts of the paper's models, and two for a CPU. Shared experts are not in them."""


def random_experts(
    shape: LayerShape, size: int, rank: int, *, device: torch.device, dtype: torch.dtype, seed: int
) -> nn.Module:
    """Return a rank's E/R experts: transformers' own module, with random weights.

    The same arguments give the same weights on one kind of device.
    """
    local = experts_per_rank(shape.n_experts, size)
    config = OlmoeConfig(
        num_experts=local, hidden_size=shape.hidden, intermediate_size=shape.intermediate
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: nn.Module = OlmoeExperts(config)
    experts = experts.to(dtype).to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed * 1000 + rank)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return experts.eval().requires_grad_(False)


@dataclass(frozen=True)
class RankTokens:
    """What a rank has before the layer.

    Attributes:
        hidden_TH: Its tokens' hidden states.
        logits_TE: The routing that they are given, in place of what random weights would choose.
        groups: Its capacity group among those of all ranks.
    """

    hidden_TH: Tensor
    logits_TE: Tensor
    groups: TokenGroups


def rank_tokens(
    shape: LayerShape,
    logits: Tensor,
    size: int,
    rank: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> RankTokens:
    """Return a rank's equal share of a batch.

    Args:
        shape: The layer.
        logits: Router logits [T·R, E] of the tokens of all ranks.
        size: Ranks R.
        rank: Which one.
        device: Where the rank computes.
        dtype: Precision of the hidden states.
        seed: Seed of the hidden states.
    """
    n_tokens = len(logits) // size
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    hidden = torch.randn(n_tokens, shape.hidden, generator=generator)
    share = BatchShare(torch.full((size,), n_tokens), torch.arange(size), size, rank)
    counted = torch.ones(1, n_tokens, dtype=torch.bool)
    return RankTokens(
        hidden.to(device=device, dtype=dtype),
        logits[rank * n_tokens : (rank + 1) * n_tokens].to(device),
        group_tokens(counted, ep_size=size, share=share).to(device),
    )


@dataclass(frozen=True)
class Routed:
    """A rank's tokens after the router, the capacity and the packing.

    Attributes:
        packed: The kept pairs, ready to be sent.
        weight_TS: Combine weight of each slot.
        top_k: Of the slots, the tokens' own.
    """

    packed: Packed
    weight_TS: Tensor
    top_k: int

    @property
    def kept(self) -> int:
        """Pairs that are kept."""
        return len(self.packed.order_P)

    @property
    def dropped(self) -> int:
        """Pairs of the tokens' own top-k that are not."""
        return int((~self.packed.keep_TS[:, : self.top_k]).sum())


class Router:
    """The gate of a layer and the decision under a capacity, as a rank makes it.

    Args:
        shape: The layer.
        size: Ranks R.
        device: Where it computes.
        dtype: Precision.
        total: Sums a load over all ranks; ``expert_drop`` asks for it.
    """

    def __init__(
        self,
        shape: LayerShape,
        size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        total: Callable[[Tensor], Tensor],
    ) -> None:
        self._shape = shape
        self._size = size
        self._total = total
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(shape.n_experts, shape.hidden, generator=generator)
        self._weight_EH = weight.to(device=device, dtype=dtype)

    def __call__(self, tokens: RankTokens, method: Method, lap: Lap) -> Routed:
        """Route a rank's tokens: the phases before anything is sent."""
        n_experts, top_k = self._shape.n_experts, self._shape.top_k
        with lap("gate"):
            # The router's own product takes its time; what it says is replaced by the given logits.
            nn.functional.linear(tokens.hidden_TH, self._weight_EH)
            score_TE = tokens.logits_TE.softmax(dim=1, dtype=torch.float32)
            weight_TK, topk_TK = score_TE.topk(top_k, dim=1)
        with lap("decide"):
            load_E = None
            if method.name == "expert_drop":
                load_E = self._total(expert_load(topk_TK, n_experts))
            if method.is_stock:
                index_TS, weight_TS = topk_TK, weight_TK
            else:
                chosen = assign(Scores(score_TE, topk_TK), method, tokens.groups, load_E=load_E)
                index_TS = chosen.index_TS.masked_fill(~chosen.keep_TS, n_experts)
                weight_TS = score_TE.gather(1, chosen.index_TS)
            weight_TS = weight_TS.to(tokens.hidden_TH.dtype)
        with lap("permute"):
            packed = pack(tokens.hidden_TH, index_TS, n_experts=n_experts, size=self._size)
        return Routed(packed, weight_TS, top_k)


def combined(rows_PH: Tensor, routed: Routed) -> Tensor:
    """Return the layer's output for a rank's tokens [T, H]."""
    return combine_rows(rows_PH, routed.packed, routed.weight_TS)
