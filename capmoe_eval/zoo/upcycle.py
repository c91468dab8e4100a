"""Upcycle a dense model: initialise a Mixture-of-Experts model with its weights.

Like Mixtral: every expert is a copy of the dense MLP, so that two experts with weights that sum to
one give the MLP's output. Like Qwen1.5-MoE: the MLP is cut into a part for the shared expert and
parts for the routed ones, each of which several experts get. Noise makes the copies different.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Shape suffixes: E experts, I width of an expert, D width of the dense MLP, H hidden size.


def upcycle(dense: PreTrainedModel, sparse: PreTrainedModel, *, noise: float, seed: int) -> None:
    """Copy a dense model into a Mixture-of-Experts model, in place.

    Attention, norms and embeddings are copied where both models have them. Routers and parameters
    that the dense model lacks (Qwen's biases and the gate of the shared expert) stay unchanged.

    Args:
        dense: A model whose layers have ``mlp.gate_proj``, ``mlp.up_proj`` and ``mlp.down_proj``.
        sparse: A model with as many layers of the same hidden size; the widths of its shared expert
            (if any) and of one or more whole experts add up to the dense width.
        noise: Standard deviation of the noise relative to that of the experts' weights.
        seed: Seed of the noise.

    Raises:
        ValueError: If the widths do not fit.
    """
    source, target = dense.state_dict(), sparse.state_dict()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in target.items():
            if name in source and source[name].shape == weight.shape:
                weight.copy_(source[name])
        for layer in range(dense.config.num_hidden_layers):
            mlp = f"model.layers.{layer}.mlp"
            gate_DH, up_DH, down_HD = (
                source[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            shared = target.get(f"{mlp}.shared_expert.gate_proj.weight")
            cut = 0 if shared is None else len(shared)
            if shared is not None:
                prefix = f"{mlp}.shared_expert"
                target[f"{prefix}.gate_proj.weight"].copy_(gate_DH[:cut])
                target[f"{prefix}.up_proj.weight"].copy_(up_DH[:cut])
                # Doubled, because an untrained sigmoid gate is about one half.
                target[f"{prefix}.down_proj.weight"].copy_(2 * down_HD[:, :cut])
            gate_up_EIH = target[f"{mlp}.experts.gate_up_proj"]
            down_EHI = target[f"{mlp}.experts.down_proj"]
            n_experts, width = down_EHI.shape[0], down_EHI.shape[2]
            parts, rest = divmod(len(gate_DH) - cut, width)
            if rest or parts < 1:
                raise ValueError(f"dense width {len(gate_DH)} is not {cut} and parts of {width}")
            for expert in range(n_experts):
                start = cut + expert % parts * width
                rows = slice(start, start + width)
                gate_up_IH = torch.cat([gate_DH[rows], up_DH[rows]])
                gate_up_EIH[expert].copy_(_noisy(gate_up_IH, noise, generator))
                down_EHI[expert].copy_(_noisy(down_HD[:, rows], noise, generator))


def _noisy(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    return weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
