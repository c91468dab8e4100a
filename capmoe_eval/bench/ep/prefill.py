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
from capmoe_eval.bench.ep.timing import Pass, RankedLayer, summed, together
from capmoe_eval.experiment.timings.schema import Load
from capmoe_eval.routing.method import Method

_VOCABULARY = 32_000
_HEAD = 64  # size of an attention head


class _Block(nn.Module):
    """Stands where a decoder layer has its MoE layer."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """Return the layer's output [B, S, H]."""
        return self._run(hidden_BSH.flatten(0, 1)).view(hidden_BSH.shape)


def _model(
    setting: LayerSetting, blocks: Sequence[Callable[[Tensor], Tensor]], tokens: int, prompt: int
) -> Callable[[], Tensor]:
    """Return a run of a random model, whose MoE layers are functions, on a rank's sequences."""
    config = OlmoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=setting.shape.hidden,
        intermediate_size=8,  # of the experts that are replaced
        num_hidden_layers=len(blocks),
        num_attention_heads=max(1, setting.shape.hidden // _HEAD),
        num_experts=2,
        num_experts_per_tok=1,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.device(setting.device):
        model: Any = OlmoeForCausalLM(config).to(setting.dtype).eval().requires_grad_(False)
        tokens_BS = (torch.arange(tokens) * 7919 % _VOCABULARY).view(-1, prompt)
    for layer, block in zip(model.model.layers, blocks, strict=True):
        layer.mlp = _Block(block)
    return lambda: model(tokens_BS, use_cache=False, logits_to_keep=1).logits


class RankedPrefill:
    """A prefill over real processes; every one makes its own and calls the same methods.

    Args:
        layers: The MoE layers.
        tokens: Tokens of this rank.
        prompt: Tokens of a sequence.
    """

    def __init__(self, layers: Sequence[RankedLayer], tokens: int, prompt: int) -> None:
        self._layers = layers
        self._method = Method("baseline")
        blocks = [self._through(layer) for layer in layers]
        self._model = _model(layers[0].setting, blocks, tokens, prompt)

    def _through(self, layer: RankedLayer) -> Callable[[Tensor], Tensor]:
        return lambda hidden_TH: layer.forward(self._method, untimed, hidden_TH)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the prefill once, until the last rank has finished it."""
        self._method = method
        clock = self._layers[0].begun()
        with clock.lap("all"):
            logits = self._model()
        return Pass({"total": together(clock, self._layers[0].world)["total"]}, logits)

    def load(self, method: Method) -> Load:
        """Return the pairs that the method leaves to be sent and computed in all layers."""
        return summed([layer.load(method) for layer in self._layers])


class EmulatedPrefill:
    """EMULATED: the dense part of one rank, and the emulated MoE layers.

    Its arguments are those of :class:`RankedPrefill`.
    """

    def __init__(self, layers: Sequence[EmulatedLayer], tokens: int, prompt: int) -> None:
        self._layers = layers
        blocks = [lambda hidden_TH: hidden_TH] * len(layers)
        self._model = _model(layers[0].setting, blocks, tokens, prompt)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the dense part and every MoE layer, and put the total together."""
        clock = Clock(self._layers[0].setting.device)
        clock.wait()
        with clock.lap("dense"):
            logits = self._model()
        dense = clock.seconds()["dense"]
        moe = sum(layer.run(method).seconds["total"] for layer in self._layers)
        return Pass({"dense": dense, "moe": moe, "total": dense + moe}, logits)

    def load(self, method: Method) -> Load:
        """Return the pairs that the method leaves to be sent and computed in all layers."""
        return summed([layer.load(method) for layer in self._layers])
