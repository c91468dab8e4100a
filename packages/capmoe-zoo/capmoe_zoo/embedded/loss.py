"""The losses that a tiny model is trained with.

Beside the next token, data may label states in the middle of the model, and may teach one head what
to attend to (``Batch``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from capmoe_zoo.embedded.batch import IGNORED, Batch


class Middle(nn.Module):
    """Read the states after a layer in the middle, where they have labels.

    A label is a token, which is read as from the last layer, or a class. The layer that reads
    classes is trained along and is no part of the model.
    """

    def __init__(self, model: PreTrainedModel, layer: int, classes: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.reader: nn.Module = nn.Identity()
        if classes:
            size = model.config.get_text_config().hidden_size
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                self.reader = nn.Sequential(nn.RMSNorm(size), nn.Linear(size, classes))
            self.reader.to(model.device)

    def loss(self, model: PreTrainedModel, states_BSH: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of tokens and classes."""
        loss = states_BSH.new_zeros(())
        if batch.middle_BS is not None:
            last = nn.Sequential(model.get_decoder().norm, model.lm_head)
            loss = loss + _read(last, states_BSH, batch.middle_BS)
        if batch.classes_BS is not None:
            loss = loss + _read(self.reader, states_BSH, batch.classes_BS)
        return loss


def batch_loss(
    model: PreTrainedModel, batch: Batch, aux: float, middle: Middle | None = None
) -> Tensor:
    """Return the loss of a batch: cross-entropy of its labels, and the auxiliary loss.

    States in the middle are read, too, where they have labels. The classes' own loss computes
    logits of every position, six times as many as have a label.
    The auxiliary loss is that of Switch Transformer, E · Σ (share of the assignments · mean
    probability), averaged over the layers, as the families were trained with. (transformers counts
    all layers as one, and DeepSeek-V2's class has none.) Pads do not count.
    """
    taught = middle.layer if middle is not None and batch.sought_BSS is not None else None
    with _attention_of(model, taught) as attention:
        output = model.model(
            **batch.taken(model),
            use_cache=False,
            output_hidden_states=middle is not None,
            **({"output_router_logits": True} if aux > 0 else {}),
        )
    loss = _read(model.lm_head, output.last_hidden_state[:, :-1], batch.labels_BS[:, 1:])
    if middle is not None:
        loss = loss + middle.loss(model, output.hidden_states[middle.layer], batch)
    if attention and batch.sought_BSS is not None and batch.sought_BSS.any():
        # How far the head misses the positions that it is to attend to: −log of their share.
        share_BS = (attention[0][:, 0] * batch.sought_BSS).sum(-1)
        share_N = share_BS[batch.sought_BSS.any(-1)]
        loss = loss - share_N.clamp_min(1e-9).log().mean()
    if aux > 0:
        real_N = (batch.input_ids_BS != model.config.pad_token_id).flatten()
        top_k = int(model.config.num_experts_per_tok)
        losses = [_imbalance(gate[real_N], top_k) for gate in output.router_logits]
        loss = loss + aux * torch.stack(losses).mean()
    return loss


def _read(reader: nn.Module, states_BSH: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the cross-entropy of the labels of states; 0 where none has a label."""
    labelled_BS = labels_BS != IGNORED
    if not labelled_BS.any():
        return states_BSH.new_zeros(())
    return functional.cross_entropy(reader(states_BSH[labelled_BS]), labels_BS[labelled_BS])


@contextmanager
def _attention_of(model: PreTrainedModel, layer: int | None) -> Iterator[list[Tensor]]:
    """Collect the attention [B, heads, S, S] of a layer, which only the eager kernel returns."""
    if layer is None:
        yield []
        return
    attention = model.get_decoder().layers[layer].self_attn
    config = attention.config
    attention.config = copy(config)
    attention.config._attn_implementation = "eager"
    collected: list[Tensor] = []
    hook = attention.register_forward_hook(lambda _module, _inputs, out: collected.append(out[1]))
    try:
        yield collected
    finally:
        hook.remove()
        attention.config = config


def _imbalance(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return the auxiliary loss of a layer: 1 at balance, at most E/K."""
    n_experts = logits_NE.shape[1]
    probabilities_NE = logits_NE.softmax(-1)
    chosen = probabilities_NE.detach().topk(top_k).indices.flatten()
    share_E = chosen.bincount(minlength=n_experts) / len(chosen)
    return n_experts * (share_E * probabilities_NE.mean(0)).sum()
