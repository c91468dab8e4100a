"""The prefill of a whole model over ranks: attention between MoE layers.

Attention, norms, embeddings and head are OLMoE's, of the layer's hidden size; every rank computes
them for its own sequences. The MoE layers are those of :mod:`capmoe_eval.bench.ep.timing`, each
with its own routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM

from capmoe_eval.bench.ep.clock import Clock, untimed
from capmoe_eval.bench.ep.emulation import EmulatedLayer
from capmoe_eval.bench.ep.layer import LayerSetting
from capmoe_eval.bench.ep.timing import Layer, Pass, RankedLayer, summed, together
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.timings.schema import Load
from capmoe_eval.routing.method import Method

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


def _decoder(setting: LayerSetting, runs: Sequence[Callable[[Tensor], Tensor]]) -> Any:
    """Return a model with random weights whose MoE layers are the given functions."""
    shape = setting.shape
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
    with torch.random.fork_rng(devices=[]), torch.device(setting.device):
        model: Any = OlmoeForCausalLM(config).to(setting.dtype).eval().requires_grad_(False)
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
        layers: The MoE layers.
        tokens: Tokens of this rank.
        prompt: Tokens of a sequence.

    Raises:
        UsageError: If the tokens of a rank are no whole number of sequences.
    """

    def __init__(self, layers: Sequence[RankedLayer], tokens: int, prompt: int) -> None:
        setting = layers[0].setting
        self._layers = layers
        self._method = Method("baseline")
        self._tokens_BS = _prompts(tokens, prompt, setting.device)
        self._model = _decoder(setting, [self._through(layer) for layer in layers])

    def _through(self, layer: RankedLayer) -> Callable[[Tensor], Tensor]:
        return lambda hidden_TH: layer.forward(self._method, untimed, hidden_TH)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the prefill once, until the last rank has finished it."""
        self._method = method
        first = self._layers[0]
        clock = Clock(first.setting.device)
        first.begin(clock)
        with clock.lap("all"):
            logits = self._model(self._tokens_BS, use_cache=False, logits_to_keep=1).logits
        return Pass({"total": together(clock, first.world)["total"]}, logits)

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed in all layers."""
        return summed([layer.load(method) for layer in self._layers])


class _FirstLayer:
    """See :attr:`EmulatedPrefill.first_layer`."""

    def __init__(self, prefill: EmulatedPrefill) -> None:
        self._prefill = prefill

    def run(self, _method: Method) -> Pass:
        """Return the first layer's part of the prefill's last pass."""
        assert self._prefill._first is not None, "time the prefill beside it, first"
        return self._prefill._first

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed in the first layer."""
        return self._prefill._layers[0].load(method)


class EmulatedPrefill:
    """EMULATED: the dense part of one rank, and the emulated MoE layers.

    Args:
        layers: The MoE layers.
        tokens: Tokens of a rank.
        prompt: Tokens of a sequence.

    Raises:
        UsageError: If the tokens of a rank are no whole number of sequences.
    """

    def __init__(self, layers: Sequence[EmulatedLayer], tokens: int, prompt: int) -> None:
        setting = layers[0].setting
        self._layers = layers
        self._first: Pass | None = None
        self._tokens_BS = _prompts(tokens, prompt, setting.device)
        self._model = _decoder(setting, [lambda hidden_TH: hidden_TH] * len(layers))

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the dense part and every MoE layer, and put the total together."""
        clock = Clock(self._layers[0].setting.device)
        clock.wait()
        with clock.lap("dense"):
            logits = self._model(self._tokens_BS, use_cache=False, logits_to_keep=1).logits
        dense = clock.seconds()["dense"]
        passes = [layer.run(method) for layer in self._layers]
        moe = sum(each.seconds["total"] for each in passes)
        self._first = passes[0]
        return Pass({"dense": dense, "moe": moe, "total": dense + moe}, logits)

    @property
    def first_layer(self) -> Layer:
        """The first layer, timed by the passes of the whole: its runs return what it just took."""
        return _FirstLayer(self)

    def load(self, method: Method) -> Load:
        """Return what the method leaves to be sent and computed in all layers."""
        return summed([layer.load(method) for layer in self._layers])
