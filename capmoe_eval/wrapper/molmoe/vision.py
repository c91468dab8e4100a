"""Compute the features of MolmoE's image tokens; parameters have the checkpoint's names."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from capmoe_eval.wrapper.molmoe.configuration import MolmoeVisionConfig

# Shape suffixes: N crops (or windows), P patches of a crop, Q queries, C width of the tower, F of
# its features (several layers side by side), D numbers of a patch, I tokens of a crop, H width of
# the language model.


class Attention(nn.Module):
    """Attention of a few queries over patches, in float32."""

    def __init__(self, config: MolmoeVisionConfig, width: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.wq = nn.Linear(width, config.hidden_size)
        self.wk = nn.Linear(width, config.hidden_size)
        self.wv = nn.Linear(width, config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, queries_NQC: Tensor, patches_NPC: Tensor) -> Tensor:
        """Return one vector per query [N, Q, C]."""
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2).float()
            for projected in (self.wq(queries_NQC), self.wk(patches_NPC), self.wv(patches_NPC))
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2).to(queries_NQC.dtype))
        return output


class Block(nn.Module):
    """A block of the tower: attention and linear layers, each behind a norm."""

    def __init__(self, config: MolmoeVisionConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention = Attention(config, width)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                w1=nn.Linear(width, inner), act=ACT2FN["quick_gelu"], w2=nn.Linear(inner, width)
            )
        )
        self.attention_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.ffn_norm = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(self, hidden_NPC: Tensor) -> Tensor:
        """Return the states after this block [N, P, C]."""
        normed_NPC = self.attention_norm(hidden_NPC)
        hidden_NPC = hidden_NPC + self.attention(normed_NPC, normed_NPC)
        output_NPC: Tensor = hidden_NPC + self.feed_forward(self.ffn_norm(hidden_NPC))
        return output_NPC


class Tower(nn.Module):
    """CLIP's vision transformer, which reads patches as rows of numbers."""

    def __init__(self, config: MolmoeVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(config.num_positions, width))
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, eps=config.norm_eps)
        self.transformer = nn.ModuleDict(
            {"resblocks": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))}
        )

    def forward(self, patches_NPD: Tensor) -> list[Tensor]:
        """Return the states after every block [N, 1 + P, C], the class first."""
        embedded_NPC = self.patch_embedding(patches_NPD)
        first_N1C = self.class_embedding.expand(len(embedded_NPC), 1, -1)
        hidden_NPC = torch.cat([first_N1C, embedded_NPC], dim=1) + self.positional_embedding
        hidden_NPC = self.pre_ln(hidden_NPC)
        states = []
        for block in self.transformer["resblocks"].children():
            hidden_NPC = block(hidden_NPC)
            states.append(hidden_NPC)
        return states


class Projector(nn.Module):
    """The SwiGLU that leads from the tower to the language model."""

    def __init__(self, width: int, inner: int, output: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, output, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return vectors of the language model's width."""
        output: Tensor = self.w2(nn.functional.silu(self.w1(hidden)) * self.w3(hidden))
        return output


class VisionBackbone(nn.Module):
    """The tower, what marks padding, the pooling of 2 × 2 patches, and the projector."""

    def __init__(self, config: MolmoeVisionConfig, inner: int, output: int) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size * len(config.layers)
        self.pad_embed = nn.Parameter(torch.zeros(2, width))  # of patches all and partly padding
        self.image_vit = Tower(config)
        self.image_pooling_2d = Attention(config, width)
        self.image_projector = Projector(config.hidden_size, inner, output)

    def forward(self, patches_NPD: Tensor, image_masks_NP: Tensor) -> Tensor:
        """Return the features of the tokens of every crop [N, I, H].

        Args:
            patches_NPD: The pixels of the patches of each crop.
            image_masks_NP: Share of each patch that is no padding.
        """
        states = self.image_vit(patches_NPD)
        features_NPF = torch.cat([states[layer][:, 1:] for layer in self.config.layers], dim=-1)
        # The remote code sets the features of a crop with the number −1 in it to zero, as one that
        # fills up a batch. Such a crop's tokens have no place, and in bfloat16 many a pixel is −1.
        padding_NP = image_masks_NP == 0
        partly_NP = (image_masks_NP < 1) & ~padding_NP
        dtype = features_NPF.dtype
        for mark_F, where_NP in zip(self.pad_embed, (padding_NP, partly_NP), strict=True):
            features_NPF = features_NPF + mark_F * where_NP[..., None].float()
        windows = _windows(features_NPF.to(dtype), self.config.patches_per_side)
        pooled = self.image_pooling_2d(windows.mean(dim=1, keepdim=True), windows)
        tokens_NIC = pooled.view(len(patches_NPD), -1, pooled.shape[-1])
        projected_NIH: Tensor = self.image_projector(tokens_NIC)
        return projected_NIH


def _windows(features_NPF: Tensor, side: int) -> Tensor:
    """Return the four patches of every window of 2 × 2 [N · P/4, 4, F], row by row of the crop."""
    grid = features_NPF.view(len(features_NPF), side // 2, 2, side // 2, 2, -1)
    return grid.transpose(2, 3).reshape(-1, 4, features_NPF.shape[-1])
