"""The prefill of a whole model over ranks: attention between MoE layers.

Attention, norms, embeddings and head are OLMoE's, of the layer's hidden size; every rank computes
them for its own sequences. The MoE layers are those of :mod:`capmoe_eval.parallel.timing`, all with
the same routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM

from capmoe_eval.errors import UsageError
from capmoe_eval.method import Method
from capmoe_eval.parallel.emulation import EmulatedLayer
from capmoe_eval.parallel.layer import LayerShape
from capmoe_eval.parallel.timing import Clock, Load, Pass, RankedLayer, slowest, untimed

_VOCABULARY = 32_000
_HEAD = 64  # size of an attention head


class _Block(nn.Module):
    """What stands where a decoder layer has its MoE layer."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """Return the layer's output [B, S, H]."""
        hidden_TH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
        return self._run(hidden_TH).view(hidden_BSH.shape)


def _decoder(
    shape: LayerShape,
    runs: list[Callable[[Tensor], Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Return a model with random weights whose MoE layers are the given functions."""
    config = OlmoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=8,  # of the experts that are replaced
        num_hidden_layers=len(runs),
        num_attention_heads=max(1, shape.hidden // _HEAD),
        num_experts=2,
        num_experts_per_tok=1,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        model: Any = OlmoeForCausalLM(config).to(dtype).eval().requires_grad_(False)
    for layer, run in zip(model.model.layers, runs, strict=True):
        layer.mlp = _Block(run)
    return model


def _prompts(tokens: int, length: int, device: torch.device) -> Tensor:
    """Return a rank's sequences [B, S]."""
    if tokens % length:
        raise UsageError(f"prompt={length}: {tokens} tokens of a rank are no whole number of them")
    return (torch.arange(tokens, device=device) * 7919 % _VOCABULARY).view(-1, length)


class RankedPrefill:
    """A prefill over real processes; every one makes its own and calls the same methods.

    Args:
        shape: Sizes of the MoE layers.
        layers: The MoE layers.
        tokens: Tokens of this rank.
        prompt: Tokens of a sequence.
        device: Where this process computes.
        dtype: Precision.

    Raises:
        UsageError: If the tokens of a rank are no whole number of sequences.
    """

    def __init__(
        self,
        shape: LayerShape,
        layers: list[RankedLayer],
        tokens: int,
        prompt: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._layers = layers
        self._device = device
        self._method = Method("baseline")
        self._tokens_BS = _prompts(tokens, prompt, device)
        self._model = _decoder(shape, [self._through(layer) for layer in layers], device, dtype)

    def _through(self, layer: RankedLayer) -> Callable[[Tensor], Tensor]:
        return lambda hidden_TH: layer.forward(self._method, untimed, hidden_TH)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the prefill once, and return the slowest rank's time."""
        self._method = method
        clock = Clock(self._device, self._layers[0].barrier)
        with clock.lap("total"):
            logits = self._model(self._tokens_BS, use_cache=False, logits_to_keep=1).logits
        return Pass(slowest(clock.seconds, self._layers[0].world, self._device), logits)

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed in every layer."""
        return self._layers[0].load(method)


class EmulatedPrefill:
    """EMULATED: the dense part of one rank, and as many times one emulated MoE layer.

    Args:
        shape: Sizes of the MoE layers.
        layer: One MoE layer.
        n_layers: How many.
        tokens: Tokens of a rank.
        prompt: Tokens of a sequence.
        device: Where it computes.
        dtype: Precision.

    Raises:
        UsageError: If the tokens of a rank are no whole number of sequences.
    """

    def __init__(
        self,
        shape: LayerShape,
        layer: EmulatedLayer,
        n_layers: int,
        tokens: int,
        prompt: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._layer = layer
        self._n_layers = n_layers
        self._device = device
        self._tokens_BS = _prompts(tokens, prompt, device)
        self._model = _decoder(shape, [lambda hidden_TH: hidden_TH] * n_layers, device, dtype)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the dense part and one MoE layer, and put the total together."""
        clock = Clock(self._device)
        with clock.lap("dense"):
            logits = self._model(self._tokens_BS, use_cache=False, logits_to_keep=1).logits
        one = self._layer.run(method).seconds["total"]
        dense = clock.seconds["dense"]
        moe = self._n_layers * one
        return Pass({"dense": dense, "moe": moe, "total": dense + moe}, logits)

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed in every layer."""
        return self._layer.load(method)
