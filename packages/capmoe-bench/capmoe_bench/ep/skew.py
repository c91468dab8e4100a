"""Router logits with a wanted imbalance, and a model whose routers have it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import expert_load
from torch import Tensor

from capmoe_bench.ep.layer import LayerSetting, random_model
from capmoe_bench.ep.studies import Shape
from capmoe_bench.rounds import say

# Shape suffixes: B sequences, S positions, T = B·S tokens, E experts, K = top-k, H hidden size.

_STRONGEST = 64.0  # beside noise of variance 1, all tokens choose the same experts
_STRENGTHS = 2**40  # steps up to it
_ROUNDS = 200  # corrections of a traced load
_SAMPLE = 4096  # tokens that are enough to find it


def peak_load(logits_TE: Tensor, top_k: int) -> float:
    """Return the highest load of an expert over the mean load N̄ = T·K/E (paper Figure 2)."""
    load_E = expert_load(logits_TE.topk(top_k, dim=1).indices, logits_TE.shape[1])
    return float(load_E.max()) / float(load_E.double().mean())


def check_peak(peak: float, n_experts: int, top_k: int) -> None:
    """Refuse a highest load over the mean load that no routing can have, by a UsageError."""
    highest = n_experts / top_k
    if not 1 <= peak <= highest:
        raise UsageError(
            f"peak={peak:g}: with {n_experts} experts and {top_k} per token the fullest expert has "
            f"1 to {highest:g} times the mean load"
        )


def popularity(n_experts: int) -> Tensor:
    """Return the experts' popularities [E]: quantiles of a normal distribution, lowest first."""
    quantile_E: Tensor = torch.special.ndtri((torch.arange(n_experts) + 0.5) / n_experts)
    return quantile_E


def strength(peak: float, peak_at: Callable[[float], float]) -> float:
    """Return the least strength of popularities at which ``peak_at`` is the peak."""
    step = _STRONGEST / _STRENGTHS
    return step * bisect_left(range(_STRENGTHS), peak, key=lambda number: peak_at(step * number))


def skewed_logits(peak: float, n_tokens: int, n_experts: int, top_k: int, layer: int = 0) -> Tensor:
    """Return router logits [T, E] whose fullest expert has ``peak`` times the mean load.

    A token's logits are noise plus the experts' popularities, as strong as the peak needs. Every
    layer has other popular experts; the first is the one that is timed alone. The paper saw peaks
    of 2 to 7 in OLMoE; one that no routing can have is a UsageError.
    """
    check_peak(peak, n_experts, top_k)
    generator = torch.Generator().manual_seed(layer)
    order_E = torch.randperm(n_experts, generator=generator)
    popular_E = popularity(n_experts).flip(0)[order_E]
    noise_TE = torch.randn(n_tokens, n_experts, generator=generator)
    sample_TE = noise_TE[:_SAMPLE]
    factor = strength(peak, lambda at: peak_load(sample_TE + at * popular_E, top_k))
    return noise_TE + factor * popular_E


def logits_of_loads(
    loads: Sequence[Sequence[float]], n_tokens: int, n_experts: int, top_k: int, layer: int = 0
) -> Tensor:
    """Return router logits [T, E] under which the experts' loads have given proportions.

    A token's logits are noise plus a constant for each expert; the constants are corrected until
    the shares of the loads are those of ``loads``, the load of every expert for each layer. The
    first layer is the one that is timed alone; layers beyond those of ``loads`` have the same loads
    over other experts, shuffled. An expert with more load than tokens is a UsageError.
    """
    load_E = torch.tensor(loads[layer % len(loads)], dtype=torch.float64)
    if layer >= len(loads):
        shuffler = torch.Generator().manual_seed(layer)
        load_E = load_E[torch.randperm(n_experts, generator=shuffler)]
    share_E = load_E / load_E.sum() * top_k  # of the tokens that choose the expert
    if float(share_E.max()) > 1:
        raise UsageError(f"load: no top-{top_k} routing can give an expert {share_E.max():.2f} T")
    generator = torch.Generator().manual_seed(layer)
    noise_TE = torch.randn(n_tokens, n_experts, generator=generator)
    sample_TE = noise_TE[:_SAMPLE]
    floor = 0.5 / len(sample_TE)
    target_E = share_E.clamp_min(floor).log()
    constant_E = torch.zeros(n_experts)
    for number in range(_ROUNDS):
        chosen_TK = (sample_TE + constant_E).topk(top_k, dim=1).indices
        now_E = expert_load(chosen_TK, n_experts).double() / len(sample_TE)
        step = 0.5 / (1 + number / 40)
        constant_E += (step * (target_E - now_E.clamp_min(floor).log())).float()
    return noise_TE + constant_E


@torch.no_grad()
def skewed_model(
    setting: LayerSetting,
    *,
    layers: int,
    batch: int,
    prompt: int,
    peak: float,
    vocabulary: int = 1024,
    head: int = 64,
) -> tuple[Any, Tensor, list[float]]:
    """Return a model, a batch [B, S] without pads, and each layer's highest load over the mean.

    Embeddings share a direction, as trained models' hidden states do. Each router's weights along
    it are the experts' popularities: quantiles of a normal distribution, with the strength that
    gives the fullest expert ``peak`` times the mean load. No number is put into the forward.
    ``prompt`` is the number of tokens of each of ``batch`` sequences, ``head`` the size of an
    attention head; the defaults suit a model whose MoE layers alone matter. A peak that no routing
    can have is a UsageError.
    """
    shape = setting.shape
    check_peak(peak, shape.n_experts, shape.top_k)
    say(f"building {layers} layers of {shape.name}")
    generator = torch.Generator().manual_seed(0)
    model = random_model(setting, layers=layers, vocabulary=vocabulary, head=head)
    common_H = torch.randn(shape.hidden, generator=generator)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator) + common_H)
    tokens_BS = torch.randint(1, vocabulary, (batch, prompt), generator=generator)
    tokens_BS = tokens_BS.to(setting.device)
    peaks, inputs = [], []
    for router in [layer.mlp.gate for layer in model.model.layers]:
        with router.register_forward_pre_hook(lambda _router, args: inputs.append(args[0])):
            model(input_ids=tokens_BS, use_cache=False)
        hidden_TH = inputs.pop().flatten(0, -2).float()
        router.weight.copy_(_router_weight(hidden_TH, shape, peak, generator))
        peaks.append(peak_load(hidden_TH @ router.weight.float().T, shape.top_k))
    return model, tokens_BS, peaks


def _router_weight(
    hidden_TH: Tensor, shape: Shape, peak: float, generator: torch.Generator
) -> Tensor:
    """Return router weights [E, H] under which the fullest expert has ``peak`` times the mean."""
    mean_H = hidden_TH.mean(dim=0)
    along_H = mean_H / mean_H.square().sum()
    noise_EH = torch.randn(shape.n_experts, shape.hidden, generator=generator).to(hidden_TH)
    noise_EH = noise_EH * hidden_TH.square().sum(dim=1).mean().rsqrt()
    noise_EH = noise_EH - (noise_EH @ mean_H)[:, None] * along_H
    order_E = torch.randperm(shape.n_experts, generator=generator)
    popular_EH = popularity(shape.n_experts)[order_E].to(hidden_TH)[:, None] * along_H

    def peak_at(factor: float) -> float:
        return peak_load(hidden_TH @ (noise_EH + factor * popular_EH).T, shape.top_k)

    weight_EH: Tensor = noise_EH + strength(peak, peak_at) * popular_EH
    return weight_EH
