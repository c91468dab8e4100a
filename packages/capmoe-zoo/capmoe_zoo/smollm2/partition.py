"""Divide the neurons of a dense FFN into shared neurons and experts; the model that is trained.

In training every neuron is computed and multiplied by the weight of its expert. That costs as much
as the dense FFN and needs no dispatch. Base weights are frozen and shared with the dense model;
low-rank updates, routers, gates and norms are trained. :func:`to_stock` makes a stock Qwen2-MoE
model of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM


@dataclass(frozen=True)
class Recipe:
    """A partition and its training; the defaults are those of ``smollm2_moe``.

    The shared neurons and the experts are all neurons of an FFN.
    """

    shared: int = 384
    experts: int = 48
    width: int = 24  # neurons of an expert; a multiple of 8, as grouped_mm needs in bfloat16
    top_k: int = 12
    step: int = 2  # every ``step``-th layer has experts
    rank: int = 32  # of the updates of an FFN with experts
    other_rank: int = 8  # of the updates of attention and of the dense FFNs
    window: int = 256  # tokens
    fit_windows: int = 24  # windows of the fit in closed form
    batch: int = 4  # windows of a step
    rate: float = 0.001
    router_rate: float = 0.0001
    warmup: int = 10  # steps
    cross_entropy: float = 0.25  # weight of the loss on the text itself
    hidden: float = 1.0  # weight of the relative error of hidden states
    ema: float = 0.98  # of the trained weights; the averaged ones are shipped
    seed: int = 0


def neuron_order(down_DF: Tensor, act_TF: Tensor, recipe: Recipe, *, rounds: int = 6) -> Tensor:
    """Return the neurons in their new order: the shared ones, then expert after expert.

    ``down_DF`` is the down projection, and ``act_TF`` what it reads [tokens, neurons].

    Shared are the neurons that contribute most on average. The others are grouped by balanced
    k-means of their contributions |activation|·‖down‖. Neurons that fire together are in the same
    expert, and so are neurons that fire often: some experts have more tokens than others.
    """
    contribution_TF = act_TF.abs() * down_DF.norm(dim=0)
    by_mean_F = contribution_TF.mean(0).argsort(descending=True)
    shared_S, rest_R = by_mean_F[: recipe.shared], by_mean_F[recipe.shared :]
    points_RT = contribution_TF[:, rest_R].T.contiguous()
    generator = torch.Generator().manual_seed(recipe.seed)
    centres_ET = points_RT[torch.randperm(len(rest_R), generator=generator)[: recipe.experts]]
    for _ in range(rounds):
        # The squared distance without the part that every centre has in common.
        cost_RE = centres_ET.pow(2).sum(1) - 2 * points_RT @ centres_ET.T
        # Every expert has ``width`` places, so that an assignment of neurons to places is balanced.
        cost_RR = cost_RE.repeat_interleave(recipe.width, dim=1)
        _, places = linear_sum_assignment(cost_RR.numpy())
        expert_R = torch.from_numpy(places) // recipe.width
        centres_ET = torch.zeros_like(centres_ET).index_add_(0, expert_R, points_RT) / recipe.width
    return torch.cat([shared_S, rest_R[expert_R.argsort(stable=True)]])


def expert_contributions(down_DF: Tensor, act_TF: Tensor, recipe: Recipe) -> Tensor:
    """Return the norm of every expert's output [tokens, experts]; the neurons are in order."""
    act_TEW = act_TF[:, recipe.shared :].view(len(act_TF), recipe.experts, recipe.width)
    down_DEW = down_DF[:, recipe.shared :].view(-1, recipe.experts, recipe.width)
    of_experts = zip(act_TEW.unbind(1), down_DEW.unbind(1), strict=True)
    return torch.stack([(act_TW @ down_DW.T).norm(dim=1) for act_TW, down_DW in of_experts], dim=1)


def fit_router(x_TD: Tensor, contribution_TE: Tensor, penalty: float = 1e-2) -> Tensor:
    """Return router rows [experts, hidden] whose logits predict the log contributions.

    This is ridge regression without intercept. The mean over the experts of a token is left out: a
    softmax does not depend on it.
    """
    target_TE = (contribution_TE + 1e-4).log()
    target_TE = target_TE - target_TE.mean(1, keepdim=True)
    gram_DD = x_TD.T @ x_TD
    gram_DD.diagonal().add_(penalty * gram_DD.diagonal().mean())
    solution_DE: Tensor = torch.linalg.solve(gram_DD, x_TD.T @ target_TE)
    return solution_DE.T.contiguous()


def routing_weights(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return the weights [tokens, experts] of the top experts, of mean 1 over these; others 0."""
    top_TK, index_TK = logits_TE.topk(top_k, dim=-1)
    weight_TK = top_k * top_TK.float().softmax(-1).to(logits_TE.dtype)
    return torch.zeros_like(logits_TE).scatter(-1, index_TK, weight_TK)


def neuron_weights(weight_TE: Tensor, recipe: Recipe, shared_T: Tensor) -> Tensor:
    """Return the weight of every neuron [..., neurons], the shared ones first."""
    shared_TS = shared_T[..., None].expand(*shared_T.shape, recipe.shared)
    return torch.cat([shared_TS, weight_TE.repeat_interleave(recipe.width, dim=-1)], dim=-1)


def low_rank_down(
    act_TF: Tensor, residual_TD: Tensor, rank: int, penalty: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Return b [hidden, rank] and a [rank, neurons] such that act @ (b a).T predicts a residual.

    This is ridge regression of a limited rank: the full solution, projected on the directions in
    which its predictions are largest.
    """
    gram_FF = act_TF.T @ act_TF
    gram_FF.diagonal().add_(penalty * gram_FF.diagonal().mean())
    full_DF = torch.linalg.solve(gram_FF, act_TF.T @ residual_TD).T
    _, vectors_DD = torch.linalg.eigh(full_DF @ gram_FF @ full_DF.T)
    b_DR = vectors_DD[:, -rank:]
    return b_DR.contiguous(), (b_DR.T @ full_DF).contiguous()


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
