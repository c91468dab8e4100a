"""MoE layers and models of any size with random weights, and one rank's work in a layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass
from functools import lru_cache
from typing import Any

import torch
from capmoe_eval.errors import check_choice
from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.decision import LayerContext, Scores, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel import Packed, combine_rows, lay_out
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

from capmoe_bench.ep.studies import Shape

# Shape suffixes: T tokens of a rank, E experts, K = top-k, S slots, H hidden size, P kept pairs.

SHAPES = {
    name: Shape(name, **sizes)
    for name, sizes in read_data(__package__, "shapes.yaml", dict[str, dict[str, int]]).items()
}
_HEAD = 64  # size of an attention head

Lap = Callable[[str], AbstractContextManager[object]]
"""Times the block under a phase's name; ``nullcontext`` times nothing."""
Total = Callable[[Tensor], Tensor]
"""Sums counts of a rank's tokens over all ranks."""


def find_shape(name: str, field: str = "shape") -> Shape:
    """Return the shape of a name, or refuse it; ``field`` is the option that said it."""
    check_choice(field, name, SHAPES)
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


def random_model(setting: LayerSetting, *, layers: int, vocabulary: int, head: int = _HEAD) -> Any:
    """Return a model without shared experts: a Mixtral where there are 8 experts, else an OLMoE."""
    shape = setting.shape
    heads = max(1, shape.hidden // head)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts_per_tok": shape.top_k,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]), torch.device(setting.device):
        torch.manual_seed(0)
        if shape.n_experts == 8:
            model = MixtralForCausalLM(MixtralConfig(num_local_experts=8, **sizes))
        else:
            model = OlmoeForCausalLM(OlmoeConfig(num_experts=shape.n_experts, **sizes))
    return model.to(setting.dtype).eval().requires_grad_(False)


def random_experts(setting: LayerSetting, rank: int) -> nn.Module:
    """Return a rank's E/R experts: transformers' own module, with random weights."""
    shape = setting.shape
    config = OlmoeConfig(
        num_experts=experts_per_rank(shape.n_experts, setting.ranks, "ranks"),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
    )
    config._experts_implementation = "grouped_mm"
    return _random_weights(OlmoeExperts, config, setting, rank)


def _random_weights(
    kind: Callable[[Any], nn.Module], config: Any, setting: LayerSetting, seed: int
) -> nn.Module:
    """Return a module whose weights are the same whenever the arguments and the device are."""
    with torch.device("meta"):
        module = kind(config)
    module = module.to(setting.dtype).to_empty(device=setting.device)
    generator = torch.Generator(device=setting.device).manual_seed(setting.seed * 1000 + seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return module.eval().requires_grad_(False)


@lru_cache(maxsize=1)  # a study times many routings of one layer
def layer_weights(
    setting: LayerSetting, ranks: tuple[int, ...]
) -> tuple[list[nn.Module], nn.Module | None]:
    """Return the experts of some ranks, and the shared ones as one gated MLP, if there are any."""
    shape = setting.shape
    experts = [random_experts(setting, rank) for rank in ranks]
    if not shape.shared:
        return experts, None
    config = Phi3Config(hidden_size=shape.hidden, intermediate_size=shape.shared)
    return experts, _random_weights(Phi3MLP, config, setting, 0)


@dataclass(frozen=True)
class Routed:
    """A rank's tokens after the router, the capacity and the packing."""

    hidden_TH: Tensor  # their hidden states before the layer
    packed: Packed  # the kept pairs, ready to be sent
    weight_TS: Tensor  # combine weight of each slot


@dataclass(eq=False)
class Rank:
    """One rank of a layer, with an equal share of a batch."""

    setting: LayerSetting
    logits: InitVar[Tensor]  # router logits [T·R, E] of the tokens of all ranks
    number: int
    experts: nn.Module
    shared: nn.Module | None
    total: Callable[[Method], Total]  # what sums counts over the ranks, in one decision

    def __post_init__(self, logits: Tensor) -> None:
        setting, number = self.setting, self.number
        shape, size, device = setting.shape, setting.ranks, setting.device
        n_tokens = len(logits) // size
        share = torch.full((size,), n_tokens), torch.arange(size), size, number
        counted = torch.ones(1, n_tokens, dtype=torch.bool)
        self.groups = group_tokens(counted, ep_size=size, share=share).to(device)
        # The routing that the tokens are given, in place of what random weights would choose.
        self.logits_TE = logits[number * n_tokens : (number + 1) * n_tokens].to(device)
        self.hidden_TH = _normal(setting, n_tokens, shape.hidden, setting.seed * 1000 + number)
        self._weight_EH = _normal(setting, shape.n_experts, shape.hidden, 0)

    def route(self, method: Method, lap: Lap, hidden_TH: Tensor | None = None) -> Routed:
        """Route the rank's tokens: the phases before anything is sent.

        ``hidden_TH`` takes the place of the rank's own random hidden states.
        """
        n_experts = self.setting.shape.n_experts
        if hidden_TH is None:
            hidden_TH = self.hidden_TH
        with lap("gate"):
            # The router's own product takes its time; what it says is replaced by the given logits.
            nn.functional.linear(hidden_TH, self._weight_EH)
            score_TE = self.logits_TE.softmax(dim=1, dtype=torch.float32)
            weight_TK, topk_TK = score_TE.topk(self.setting.shape.top_k, dim=1)
        with lap("decide"):
            if method.is_stock:
                index_TS, weight_TS = topk_TK, weight_TK
            else:
                context = LayerContext.of(
                    method,
                    self.groups,
                    top_k=topk_TK.shape[1],
                    n_experts=n_experts,
                    hidden_TH=hidden_TH,
                    total=self.total(method),
                )
                chosen = method.decide(Scores(score_TE, topk_TK), self.groups, context)
                index_TS = chosen.index_TS.masked_fill(~chosen.keep_TS, n_experts)
                weight_TS = score_TE.gather(1, chosen.index_TS)
            weight_TS = weight_TS.to(hidden_TH.dtype)
        with lap("permute"):
            packed = lay_out(hidden_TH, index_TS, n_experts=n_experts, size=self.setting.ranks)
        return Routed(hidden_TH, packed, weight_TS)

    def finish(self, rows_PH: Tensor, routed: Routed, lap: Lap) -> Tensor:
        """Return the layer's output for the rank's tokens [T, H]: the phases after the exchanges.

        ``rows_PH`` are the experts' outputs, as they came back.
        """
        with lap("combine"):
            out_TH = combine_rows(rows_PH, routed.packed, routed.weight_TS)
        if self.shared:
            with lap("shared"):
                out_TH = out_TH + self.shared(routed.hidden_TH)
        return out_TH


def _normal(setting: LayerSetting, rows: int, columns: int, seed: int) -> Tensor:
    """Return random numbers [rows, columns] on the layer's device, the same on every device."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values.to(device=setting.device, dtype=setting.dtype)
