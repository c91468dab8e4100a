"""The prefill of a whole model over ranks: attention between MoE layers.

Attention, norms, embeddings and head are OLMoE's, of the layer's hidden size; every rank computes
them for its own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM

from capmoe_eval.bench.ep.clock import Clock
from capmoe_eval.bench.ep.emulation import EmulatedLayer
from capmoe_eval.bench.ep.timing import Pass, RankedLayer, summed, together
from capmoe_eval.experiment.timings.schema import Load
from capmoe_eval.routing.method import Method

_VOCABULARY = 32_000
_HEAD = 64  # size of an attention head


class Prefill:
    """A random model on a rank's sequences, each MoE layer with its own routing.

    Layers of real ranks are in the model; every process makes its own and calls the same methods.
    EMULATED ones are timed beside it, and the model is the dense part of one rank.

    Args:
        layers: The MoE layers.
        tokens: Tokens of this rank.
        prompt: Tokens of a sequence.
    """

    def __init__(
        self, layers: Sequence[RankedLayer | EmulatedLayer], tokens: int, prompt: int
    ) -> None:
        self._layers = layers
        self._method = Method("baseline")
        setting = layers[0].setting
        config = OlmoeConfig(
            vocab_size=_VOCABULARY,
            hidden_size=setting.shape.hidden,
            intermediate_size=8,  # of the experts that are replaced
            num_hidden_layers=len(layers),
            num_attention_heads=max(1, setting.shape.hidden // _HEAD),
            num_experts=2,
            num_experts_per_tok=1,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]), torch.device(setting.device):
            model: Any = OlmoeForCausalLM(config).to(setting.dtype).eval().requires_grad_(False)
            tokens_BS = (torch.arange(tokens) * 7919 % _VOCABULARY).view(-1, prompt)
        for decoder, layer in zip(model.model.layers, layers, strict=True):
            decoder.mlp = nn.Identity()
            if isinstance(layer, RankedLayer):
                decoder.mlp.forward = partial(self._through, layer)
        self._model = partial(model, tokens_BS, use_cache=False, logits_to_keep=1)

    def _through(self, layer: RankedLayer, hidden_BSH: Tensor) -> Tensor:
        out_TH = layer.forward(self._method, nullcontext, hidden_BSH.flatten(0, 1))
        return out_TH.view(hidden_BSH.shape)

    @torch.no_grad()
    def run(self, method: Method) -> Pass:
        """Run the prefill once, until the last rank has finished it."""
        self._method, first = method, self._layers[0]
        if isinstance(first, RankedLayer):
            clock = first.begun()
            with clock.lap("all"):
                logits = self._model().logits
            return Pass({"total": together(clock, first.world)["total"]}, logits)
        clock = Clock(first.setting.device)
        clock.wait()
        with clock.lap("dense"):
            logits = self._model().logits
        dense = clock.seconds()["dense"]
        moe = sum(layer.run(method).seconds["total"] for layer in self._layers)
        return Pass({"dense": dense, "moe": moe, "total": dense + moe}, logits)

    def load(self, method: Method) -> Load:
        """Return the pairs that the method leaves to be sent and computed in all layers."""
        return summed([layer.load(method) for layer in self._layers])
