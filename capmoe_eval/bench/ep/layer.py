"""An MoE layer of any size with random weights, and one rank's work in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from capmoe_eval.bench.ep.clock import Lap
from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.routing.assign import Scores, assign, expert_load
from capmoe_eval.routing.capacity import BatchShare, experts_per_rank, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel.dispatch import Packed, combine_rows, pack

# Shape suffixes: T tokens of a rank, E experts, K = top-k, S slots, H hidden size, P kept pairs.

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("olmoe", 2048, 1024, 64, 8, 0),
        Shape("qwen1_5_moe", 2048, 1408, 60, 4, 5632),
        Shape("deepseek_v2_lite", 2048, 1408, 64, 6, 2816),
        Shape("mixtral", 4096, 14336, 8, 2, 0),
        Shape("qwen3_30b", 2048, 768, 128, 8, 0),
        Shape("small", 256, 256, 64, 8, 0),
        Shape("small_mixtral", 256, 896, 8, 2, 0),
    )
}
"""The MoE layers of the paper's models, as in their published configurations, and two for a CPU."""


def find_shape(name: str, field: str = "shape") -> Shape:
    """Return the shape of a name, which was said with the option ``field``.

    Raises:
        UsageError: If there is none of that name.
    """
    if name not in SHAPES:
        raise bad_choice(field, name, SHAPES)
    return SHAPES[name]


@dataclass(frozen=True)
class LayerSetting:
    """A layer as it is timed."""

    shape: Shape
    ranks: int
    device: torch.device  # the device of every rank
    dtype: torch.dtype = torch.float32  # precision of weights and hidden states
    seed: int = 0  # seed of weights and hidden states

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.shape.hidden * self.dtype.itemsize


def random_experts(setting: LayerSetting, rank: int) -> nn.Module:
    """Return a rank's E/R experts: transformers' own module, with random weights.

    The same arguments give the same weights on one kind of device.
    """
    shape, device = setting.shape, setting.device
    local = experts_per_rank(shape.n_experts, setting.ranks)
    config = OlmoeConfig(
        num_experts=local, hidden_size=shape.hidden, intermediate_size=shape.intermediate
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: nn.Module = OlmoeExperts(config)
    experts = experts.to(setting.dtype).to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(setting.seed * 1000 + rank)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return experts.eval().requires_grad_(False)


class SharedExperts:
    """The shared experts of a layer: one gated MLP with random weights, the same on every rank."""

    def __init__(self, setting: LayerSetting) -> None:
        shape = setting.shape
        generator = torch.Generator().manual_seed(setting.seed)

        def weight(*size: int) -> Tensor:
            values: Tensor = torch.randn(*size, generator=generator) / math.sqrt(size[-1])
            return values.to(device=setting.device, dtype=setting.dtype)

        self.gate_up = weight(2 * shape.shared, shape.hidden)
        self.down = weight(shape.hidden, shape.shared)

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """Return the MLP's output [T, H] for a rank's own tokens."""
        gate, up = nn.functional.linear(hidden_TH, self.gate_up).chunk(2, dim=1)
        out_TH: Tensor = nn.functional.linear(nn.functional.silu(gate) * up, self.down)
        return out_TH


@dataclass(frozen=True)
class Routed:
    """A rank's tokens after the router, the capacity and the packing."""

    hidden_TH: Tensor  # their hidden states before the layer
    packed: Packed  # the kept pairs, ready to be sent
    weight_TS: Tensor  # combine weight of each slot
    top_k: int  # of the slots, the tokens' own

    @property
    def dropped(self) -> int:
        """Pairs of the tokens' own top-k that are not kept."""
        return int((~self.packed.keep_TS[:, : self.top_k]).sum())


class Rank:
    """One rank of a layer, with an equal share of a batch.

    Args:
        setting: The layer; its seed is that of the hidden states.
        logits: Router logits [T·R, E] of the tokens of all ranks.
        number: The rank's number.
        experts: Its experts.
        shared: The shared experts; not asked where the layer has none.
        total: Sums a load over all ranks; ``expert_drop`` asks for it.

    Attributes:
        hidden_TH: Its tokens' hidden states.
        logits_TE: The routing that they are given, in place of what random weights would choose.
        groups: Its capacity group among those of all ranks.
    """

    def __init__(
        self,
        setting: LayerSetting,
        logits: Tensor,
        number: int,
        experts: nn.Module,
        shared: SharedExperts,
        total: Callable[[Tensor], Tensor],
    ) -> None:
        self.setting, self.experts, self.shared, self._total = setting, experts, shared, total
        shape, size, device = setting.shape, setting.ranks, setting.device
        n_tokens = len(logits) // size
        share = BatchShare(torch.full((size,), n_tokens), torch.arange(size), size, number)
        counted = torch.ones(1, n_tokens, dtype=torch.bool)
        self.groups = group_tokens(counted, ep_size=size, share=share).to(device)
        self.logits_TE = logits[number * n_tokens : (number + 1) * n_tokens].to(device)
        seed = setting.seed * 1000 + number
        self.hidden_TH = _normal(setting, n_tokens, shape.hidden, seed)
        self._weight_EH = _normal(setting, shape.n_experts, shape.hidden, 0)

    def route(self, method: Method, lap: Lap, hidden_TH: Tensor | None = None) -> Routed:
        """Route the rank's tokens: the phases before anything is sent.

        Args:
            method: The method.
            lap: Times each phase.
            hidden_TH: Hidden states in place of the rank's own random ones.
        """
        n_experts, top_k = self.setting.shape.n_experts, self.setting.shape.top_k
        if hidden_TH is None:
            hidden_TH = self.hidden_TH
        with lap("gate"):
            # The router's own product takes its time; what it says is replaced by the given logits.
            nn.functional.linear(hidden_TH, self._weight_EH)
            score_TE = self.logits_TE.softmax(dim=1, dtype=torch.float32)
            weight_TK, topk_TK = score_TE.topk(top_k, dim=1)
        with lap("decide"):
            load_E = None
            if method.name == "expert_drop":
                load_E = self._total(expert_load(topk_TK, n_experts))
            if method.is_stock:
                index_TS, weight_TS = topk_TK, weight_TK
            else:
                chosen = assign(Scores(score_TE, topk_TK), method, self.groups, load_E=load_E)
                index_TS = chosen.index_TS.masked_fill(~chosen.keep_TS, n_experts)
                weight_TS = score_TE.gather(1, chosen.index_TS)
            weight_TS = weight_TS.to(hidden_TH.dtype)
        with lap("permute"):
            packed = pack(hidden_TH, index_TS, n_experts=n_experts, size=self.setting.ranks)
        return Routed(hidden_TH, packed, weight_TS, top_k)

    def finish(self, rows_PH: Tensor, routed: Routed, lap: Lap) -> Tensor:
        """Return the layer's output for the rank's tokens [T, H]: the phases after the exchanges.

        Args:
            rows_PH: The experts' outputs, as they came back.
            routed: The rank's tokens after the router.
            lap: Times each phase; the shared experts are computed after all else.
        """
        with lap("combine"):
            out_TH = combine_rows(rows_PH, routed.packed, routed.weight_TS)
        if self.setting.shape.shared:
            with lap("shared"):
                out_TH = out_TH + self.shared(routed.hidden_TH)
        return out_TH


def _normal(setting: LayerSetting, rows: int, columns: int, seed: int) -> Tensor:
    """Return random numbers [rows, columns] on the layer's device, the same on every device."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values.to(device=setting.device, dtype=setting.dtype)
