"""The paper's Algorithms 1 and 2, line by line.

Our decision is timed against them. They begin with the scores and the top-k of a router; each rank
runs them on its own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shape suffixes: T tokens of a rank, K = top-k, E experts, L experts of a rank.


def token_drop(score_TE: Tensor, topk_TK: Tensor, gamma: float) -> Tensor:
    """Return the final map [T, E] of Algorithm 1: 1 where the pair is kept."""
    topk_mask_TE = torch.zeros_like(score_TE).scatter(1, topk_TK, 1)
    masked_TE = score_TE * topk_mask_TE
    n_tokens, n_experts = score_TE.size()
    cap = int(gamma * (n_tokens * topk_TK.shape[1]) / n_experts)
    _, keep_idx = masked_TE.topk(cap, dim=0)
    cap_mask_TE = torch.zeros_like(score_TE).scatter(0, keep_idx, 1)
    return topk_mask_TE * cap_mask_TE


def expanded_drop(score_TE: Tensor, topk_TK: Tensor, gamma: float, local_ids: list[int]) -> Tensor:
    """Return the final map [T, E] of Algorithm 2: 1 where the pair is kept."""
    n_tokens, n_experts = score_TE.size()
    local_TL = torch.tensor(local_ids, device=score_TE.device).repeat(n_tokens, 1)
    exp_idx = torch.cat([topk_TK, local_TL], dim=1)
    exp_mask_TE = torch.zeros_like(score_TE).scatter(1, exp_idx, 1)
    masked_TE = score_TE * exp_mask_TE
    cap = int(gamma * (n_tokens * topk_TK.shape[1]) / n_experts)
    _, keep_idx = masked_TE.topk(cap, dim=0)
    cap_mask_TE = torch.zeros_like(score_TE).scatter(0, keep_idx, 1)
    return exp_mask_TE * cap_mask_TE
