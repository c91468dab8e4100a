"""MoE layers and models of any size with random weights, and one rank's pass through a layer."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from capmoe_eval.errors import check_choice
from capmoe_eval.experiment.files import read_data
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.parallel import combine_rows, lay_out, run_experts
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
Totals = Callable[[Method], Callable[[Tensor], Tensor]]
"""Return what sums counts of a rank's tokens over all ranks, in one decision of a method."""
Weights = tuple[nn.Module, nn.Module | None]
"""A rank's experts, and the shared ones as one gated MLP, if there are any."""


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
def layer_weights(setting: LayerSetting, ranks: tuple[int, ...]) -> list[Weights]:
    """Return random weights of some ranks, in the modules of transformers.

    They are the E/R experts of a rank and the shared experts, which all ranks have.
    """
    shape, shared = setting.shape, None
    config = OlmoeConfig(
        num_experts=experts_per_rank(shape.n_experts, setting.ranks, "ranks"),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
    )
    config._experts_implementation = "grouped_mm"
    if shape.shared:
        gated = Phi3Config(hidden_size=shape.hidden, intermediate_size=shape.shared)
        shared = _random_weights(Phi3MLP, gated, setting, 0)
    return [(_random_weights(OlmoeExperts, config, setting, rank), shared) for rank in ranks]


def decided(method: Method, scores: Scores, groups: TokenGroups, **about: Any) -> Assignment:
    """Return a method's decision, with the capacities that it needs; ``about`` is its context."""
    top_k, n_experts = scores.topk_TK.shape[1], scores.score_TE.shape[1]
    context = LayerContext.of(method, groups, top_k=top_k, n_experts=n_experts, **about)
    return method.decide(scores, groups, context)


class Rank:
    """One rank of a layer, with an equal share of a batch."""

    def __init__(
        self, setting: LayerSetting, logits: Tensor, number: int, weights: Weights, total: Totals
    ) -> None:
        """Take the rank's share of the router logits [T·R, E] of all ranks' tokens."""
        self.setting, self.number, self._total = setting, number, total
        self.experts, self.shared = weights
        size, n_tokens = setting.ranks, len(logits) // setting.ranks
        share = torch.full((size,), n_tokens), torch.arange(size), size, number
        counted = torch.ones(1, n_tokens, dtype=torch.bool)
        self.groups = group_tokens(counted, ep_size=size, share=share).to(setting.device)
        # The routing that the tokens are given, in place of what random weights would choose.
        self.logits_TE = logits[number * n_tokens : (number + 1) * n_tokens].to(setting.device)
        hidden, seed = setting.shape.hidden, setting.seed * 1000 + number
        self.hidden_TH = _normal(setting, n_tokens, hidden, seed)
        self._weight_EH = _normal(setting, setting.shape.n_experts, hidden, 0)

    def steps(
        self, method: Method, lap: Lap = nullcontext, hidden_TH: Tensor | None = None
    ) -> Generator[Any, Any, None]:
        """Pass the rank's tokens through the layer; it stops where ranks exchange rows.

        ``hidden_TH`` takes the place of the rank's own random hidden states. Yields in turn:

        - the :class:`Packed` pairs; sent back are the rows that arrived [A, H] and the
          :class:`Exchange`
        - the outputs of the rank's experts [A, H]; sent back are those of its own pairs [P, H]
        - the layer's output for the rank's tokens [T, H]
        """
        shape = self.setting.shape
        hidden_TH = self.hidden_TH if hidden_TH is None else hidden_TH
        with lap("gate"):
            # The router's own product takes its time; what it says is replaced by the given logits.
            nn.functional.linear(hidden_TH, self._weight_EH)
            score_TE = self.logits_TE.softmax(dim=1, dtype=torch.float32)
            weight_TK, topk_TK = score_TE.topk(shape.top_k, dim=1)
        with lap("decide"):
            index_TS, weight_TS = topk_TK, weight_TK
            if not method.is_stock:
                about = {"hidden_TH": hidden_TH, "total": self._total(method)}
                chosen = decided(method, Scores(score_TE, topk_TK), self.groups, **about)
                index_TS = chosen.index_TS.masked_fill(~chosen.keep_TS, shape.n_experts)
                weight_TS = score_TE.gather(1, chosen.index_TS)
            weight_TS = weight_TS.to(hidden_TH.dtype)
        with lap("permute"):
            size = self.setting.ranks
            packed = lay_out(hidden_TH, index_TS, n_experts=shape.n_experts, size=size)
        arrived_AH, exchange = yield packed
        with lap("experts"):
            done_AH = run_experts(self.experts, arrived_AH, exchange)
        rows_PH = yield done_AH
        with lap("combine"):
            out_TH = combine_rows(rows_PH, packed, weight_TS)
        if self.shared:
            with lap("shared"):
                out_TH = out_TH + self.shared(hidden_TH)
        yield out_TH


def _normal(setting: LayerSetting, rows: int, columns: int, seed: int) -> Tensor:
    """Return random numbers [rows, columns] on the layer's device, the same on every device."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values.to(device=setting.device, dtype=setting.dtype)
