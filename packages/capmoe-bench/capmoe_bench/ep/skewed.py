"""A model whose routers load the fullest expert as much as is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capmoe_bench.ep.layer import LayerSetting, random_model
from capmoe_bench.ep.skew import check_peak, peak_load, popularity, strength
from capmoe_bench.ep.studies import Shape
from capmoe_bench.rounds import say

# Shape suffixes: B sequences, S positions, T = B·S tokens, E experts, H hidden size.


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
