"""The partitioned model in the form that is trained, and as a stock Qwen2-MoE model.

In training every neuron is computed and multiplied by the weight of its expert. That costs as much
as the dense FFN and needs no dispatch. Base weights are frozen and shared with the dense model;
low-rank updates, routers, gates and norms are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from capmoe_zoo.smollm2.partition import Recipe, neuron_weights, routing_weights


class LowRank(nn.Module):
    """A frozen linear map and a trained update of limited rank, which begins as nothing."""

    weight_OI: Tensor

    def __init__(self, weight_OI: Tensor, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight_OI", weight_OI, persistent=False)
        outputs, inputs = weight_OI.shape
        self.a_RI = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b_OR = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of x [..., inputs]."""
        update = functional.linear(functional.linear(x, self.a_RI), self.b_OR)
        return functional.linear(x, self.weight_OI) + update

    def merged(self) -> Tensor:
        """Return the weight of the same map without the update [outputs, inputs]."""
        # In double precision, so that processors differ in no digit that bfloat16 has.
        product_OI = self.b_OR.double() @ self.a_RI.double()
        return (self.weight_OI.double() + product_OI).to(self.weight_OI.dtype)


class PartitionedFfn(nn.Module):
    """A gated FFN whose neurons are shared or belong to an expert; every neuron is computed."""

    order_F: Tensor

    def __init__(self, dense: Any, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        neurons, hidden = dense.gate_proj.weight.shape
        _add_updates(dense, recipe.rank)
        self.gate_proj, self.up_proj = dense.gate_proj, dense.up_proj
        self.down_proj = dense.down_proj
        self.router_ED = nn.Parameter(torch.zeros(recipe.experts, hidden))
        self.shared_gate_D = nn.Parameter(torch.zeros(hidden))
        self.register_buffer("order_F", torch.arange(neurons))

    def permute(self, order_F: Tensor) -> None:
        """Put the neurons of the frozen weights in an order; before it they are in the base's."""
        self.order_F.copy_(order_F)
        self.gate_proj.weight_OI = self.gate_proj.weight_OI[order_F].contiguous()
        self.up_proj.weight_OI = self.up_proj.weight_OI[order_F].contiguous()
        self.down_proj.weight_OI = self.down_proj.weight_OI[:, order_F].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the shared neurons and of every token's top experts."""
        act = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        weight = routing_weights(functional.linear(x, self.router_ED), self.recipe.top_k)
        shared = 2 * torch.sigmoid(x @ self.shared_gate_D)
        output: Tensor = self.down_proj(act * neuron_weights(weight, self.recipe, shared))
        return output


def build_student(base: LlamaForCausalLM, recipe: Recipe) -> LlamaForCausalLM:
    """Return a model that shares the frozen weights of a base, with updates that are nothing yet.

    The layers that have experts are those of Qwen2-MoE's ``decoder_sparse_step``.
    """
    torch.manual_seed(recipe.seed)
    with torch.device("meta"):
        student = LlamaForCausalLM(base.config)
    student.load_state_dict(base.state_dict(), assign=True)
    student.tie_weights()
    student.model.rotary_emb = base.model.rotary_emb
    student.requires_grad_(False)
    for index, layer in enumerate(student.model.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight = nn.Parameter(norm.weight.detach().clone())
        if (index + 1) % recipe.step == 0:
            layer.mlp = PartitionedFfn(layer.mlp, recipe)
        _add_updates(layer.self_attn, recipe.other_rank)
        _add_updates(layer.mlp, recipe.other_rank)
    return student.eval()


def _add_updates(block: nn.Module, rank: int) -> None:
    """Put a :class:`LowRank` in the place of every linear map of a block."""
    for name, child in list(block.named_children()):
        if isinstance(child, nn.Linear):
            setattr(block, name, LowRank(child.weight.detach(), rank))


def partitioned(student: LlamaForCausalLM) -> Iterator[PartitionedFfn]:
    """Yield the FFNs with experts, first to last."""
    for layer in student.model.layers:
        if isinstance(layer.mlp, PartitionedFfn):
            yield layer.mlp


def trained_state(student: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return what training made, by name: trained parameters and orders of neurons."""
    state = {name: p.detach() for name, p in student.named_parameters() if p.requires_grad}
    state |= {name: b for name, b in student.named_buffers() if name.endswith("order_F")}
    return state


def load_trained(student: LlamaForCausalLM, state: dict[str, Tensor]) -> None:
    """Put a state of ``trained_state`` into a student that was just built by the same recipe."""
    for name, module in student.named_modules():
        if isinstance(module, PartitionedFfn):
            module.permute(state[f"{name}.order_F"].long())
    with torch.no_grad():
        for name, target in trained_state(student).items():
            target.copy_(state[name])


_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""What the configurations of both classes have alike."""


@torch.no_grad()
def to_stock(student: LlamaForCausalLM) -> Qwen2MoeForCausalLM:
    """Return the same function as a stock Qwen2-MoE model.

    Its normalized routing weights sum to 1 where a student's have the mean 1 over the top experts,
    and its gate of the shared expert begins at a half: the down projections make up for both.
    """
    recipe = next(partitioned(student)).recipe
    config = Qwen2MoeConfig(
        **{name: getattr(student.config, name) for name in _SAME},
        decoder_sparse_step=recipe.step,
        moe_intermediate_size=recipe.width,
        shared_expert_intermediate_size=recipe.shared,
        num_experts_per_tok=recipe.top_k,
        num_experts=recipe.experts,
        norm_topk_prob=True,
        qkv_bias=False,
        dtype="float32",
    )
    state = {
        name: parameter.detach()
        for name, parameter in student.named_parameters()
        if not name.startswith("model.layers.") or "norm" in name
    }
    for name, module in student.named_modules():
        if isinstance(module, LowRank):
            state[f"{name}.weight"] = module.merged()
    shared, experts = recipe.shared, (recipe.experts, recipe.width, -1)
    for name, ffn in student.named_modules():
        if not isinstance(ffn, PartitionedFfn):
            continue
        gate_FD, up_FD, down_DF = (
            state.pop(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        state[f"{name}.shared_expert.gate_proj.weight"] = gate_FD[:shared].clone()
        state[f"{name}.shared_expert.up_proj.weight"] = up_FD[:shared].clone()
        state[f"{name}.shared_expert.down_proj.weight"] = 2 * down_DF[:, :shared]
        state[f"{name}.shared_expert_gate.weight"] = ffn.shared_gate_D[None]
        state[f"{name}.gate.weight"] = ffn.router_ED
        gate_EWD, up_EWD = gate_FD[shared:].view(experts), up_FD[shared:].view(experts)
        state[f"{name}.experts.gate_up_proj"] = torch.cat([gate_EWD, up_EWD], dim=1)
        down_EWD = recipe.top_k * down_DF[:, shared:].T.reshape(experts)
        state[f"{name}.experts.down_proj"] = down_EWD.transpose(1, 2).contiguous()
    stock = Qwen2MoeForCausalLM(config).eval()
    # With tied embeddings the head is in no state.
    missing, unexpected = stock.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not match: missing {missing}, unexpected {unexpected}")
    stock.tie_weights()
    return stock
