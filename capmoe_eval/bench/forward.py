"""Benchmark `forward`: the wrapper against the stock model."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

from capmoe_eval.bench.alternate import alternate, finish, ratio, timed
from capmoe_eval.bench.device import device_of, dtype_name, dtype_of, say
from capmoe_eval.bench.ep.clock import Clock
from capmoe_eval.bench.ep.layer import find_shape
from capmoe_eval.bench.ep.skew import check_peak, peak_load, popularity, strength
from capmoe_eval.bench.options import RANKS
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.schema import Shape
from capmoe_eval.experiment.timings.spread import Target
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.session import capacity_aware

# Shape suffixes: B sequences, S positions, T = B·S tokens, E experts, H hidden size.

SIDES = {
    "baseline": (Method("baseline"), 0.98, "meter and proofs alone"),
    "score, γ=1000": (Method("score", 1000.0), 0.98, "a whole decision that drops nothing"),
    "score, γ=1": (Method("score", 1.0), 1.05, "dropped pairs are not computed"),
    f"expanded_drop local, γ=1, {RANKS} ranks": (
        Method("expanded_drop", 1.0, ep_size=RANKS),
        0.95,
        "free slots are filled again",
    ),
}
"""Each method, the least throughput over that of the stock model, and what it stands for."""
_MIN_DROP = 0.15
"""A speedup is a target only for a router that makes the method drop at least this share."""
_VOCABULARY = 1024
_HEAD = 64  # size of an attention head


def run(given: argparse.Namespace) -> None:
    """Time the forwards, print the ratios and write ``forward.json``.

    Raises:
        UsageError: For a value that cannot be.
    """
    shape = find_shape(given.shape)
    if given.batch % RANKS:
        raise UsageError(f"batch={given.batch}: must be a multiple of {RANKS}")
    check_peak(given.peak, shape.n_experts, shape.top_k)
    device = device_of(given.device)
    dtype = dtype_of(given.dtype, device)
    say(f"building {given.layers} layers of {given.shape}")
    built = skewed_model(
        shape,
        layers=given.layers,
        batch=given.batch,
        prompt=given.prompt,
        peak=given.peak,
        device=device,
        dtype=dtype,
    )
    wait = Clock(device).wait
    drops: dict[str, float] = {}

    @torch.no_grad()
    def forward() -> None:
        built.model(input_ids=built.tokens_BS, use_cache=False)

    def under(name: str) -> float:
        # Entering and leaving the wrapper is not timed: an evaluation does it once.
        with capacity_aware(built.model, SIDES[name][0], verify=False) as meter:
            spent = timed(forward, wait)
        drops[name] = meter.summary()["drop_rate"]
        return spent

    sides = {"stock": partial(timed, forward, wait)} | {n: partial(under, n) for n in SIDES}
    seconds = alternate(sides, rounds=given.rounds, warmup=given.warmup, title="forward")
    targets = [
        Target(
            f"{name} over stock",
            f"Forward throughput under {name} over that of the stock model: {what} "
            f"({100 * drops[name]:.1f} % dropped)",
            ratio(seconds["stock"], seconds[name]),
            target if target <= 1 or drops[name] >= _MIN_DROP else None,
        )
        for name, (_, target, what) in SIDES.items()
    ]
    finish(
        given,
        device,
        targets,
        ("layers", "batch", "prompt"),
        shape=dataclasses.asdict(shape),
        dtype=dtype_name(dtype),
        peaks=built.peaks,
        dropped_share=drops,
        seconds=seconds,
    )


@dataclass(frozen=True)
class SkewedModel:
    """A model, a batch for it, and how uneven its routing of the batch is."""

    model: Any  # ready to run, on its device
    tokens_BS: Tensor  # the batch; no padding
    peaks: list[float]  # the highest load of an expert over the mean load, layer by layer


@torch.no_grad()
def skewed_model(
    shape: Shape,
    *,
    layers: int,
    batch: int,
    prompt: int,
    peak: float,
    device: torch.device,
    dtype: torch.dtype,
) -> SkewedModel:
    """Return a model whose experts' loads on a batch are as uneven as asked for.

    Embeddings share a direction, as trained models' hidden states do, and each router's weights
    along it are the experts' popularities (quantiles of a normal distribution), with the strength
    that gives the fullest expert ``peak`` times the mean load. No number is put into the forward.
    With 8 experts the model is a Mixtral, else an OLMoE; ``prompt`` is the number of tokens of each
    of ``batch`` sequences.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = _model(shape, layers).to(dtype).eval().requires_grad_(False)
    common_H = torch.randn(shape.hidden, generator=generator)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator) + common_H)
    tokens_BS = torch.randint(1, _VOCABULARY, (batch, prompt), generator=generator).to(device)
    peaks = []
    for router in [layer.mlp.gate for layer in model.model.layers]:
        hidden_TH = _input_of(router, model, tokens_BS).float().cpu()
        router.weight.copy_(_router_weight(hidden_TH, shape, peak, generator))
        peaks.append(peak_load(hidden_TH @ router.weight.float().cpu().T, shape.top_k))
    return SkewedModel(model, tokens_BS, peaks)


def _model(shape: Shape, layers: int) -> Any:
    common: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, shape.hidden // _HEAD),
        "num_key_value_heads": max(1, shape.hidden // _HEAD),
        "num_experts_per_tok": shape.top_k,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if shape.n_experts == 8:
        return MixtralForCausalLM(MixtralConfig(num_local_experts=8, **common))
    return OlmoeForCausalLM(OlmoeConfig(num_experts=shape.n_experts, **common))


def _input_of(router: nn.Module, model: Any, tokens_BS: Tensor) -> Tensor:
    """Return the hidden states [T, H] that a router gets when the model runs on a batch."""
    got: list[Tensor] = []
    handle = router.register_forward_pre_hook(lambda _router, args: got.append(args[0]))
    try:
        model(input_ids=tokens_BS, use_cache=False)
    finally:
        handle.remove()
    return got[0].reshape(-1, got[0].shape[-1])


def _router_weight(
    hidden_TH: Tensor, shape: Shape, peak: float, generator: torch.Generator
) -> Tensor:
    """Return router weights [E, H] under which the fullest expert has ``peak`` times the mean."""
    mean_H = hidden_TH.mean(dim=0)
    along_H = mean_H / mean_H.square().sum()
    noise_EH = torch.randn(shape.n_experts, shape.hidden, generator=generator)
    noise_EH = noise_EH * hidden_TH.square().sum(dim=1).mean().rsqrt()
    noise_EH = noise_EH - (noise_EH @ mean_H)[:, None] * along_H
    order_E = torch.randperm(shape.n_experts, generator=generator)
    popular_EH = popularity(shape.n_experts)[order_E][:, None] * along_H

    def peak_at(factor: float) -> float:
        return peak_load(hidden_TH @ (noise_EH + factor * popular_EH).T, shape.top_k)

    weight_EH: Tensor = noise_EH + strength(peak, peak_at) * popular_EH
    return weight_EH
