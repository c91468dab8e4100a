"""Packing and combining on one rank, beside the single-process kernel and a loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capmoe_eval.wrapper.dispatch import combine_rows, lay_out
from capmoe_eval.wrapper.kernel import combine

TOKENS, SLOTS, EXPERTS, HIDDEN = 37, 5, 8, 6


def routed(share: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, experts of slots (E where dropped), and weights."""
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    index_TS = torch.rand(TOKENS, EXPERTS, generator=generator).topk(SLOTS, dim=1).indices
    dropped_TS = torch.rand(TOKENS, SLOTS, generator=generator) >= share
    weight_TS = torch.rand(TOKENS, SLOTS, generator=generator)
    return hidden_TH, index_TS.masked_fill(dropped_TS, EXPERTS), weight_TS


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_pairs_are_laid_out_by_expert_then_token(share: float) -> None:
    hidden_TH, index_TS, _ = routed(share)
    packed = lay_out(hidden_TH, index_TS, n_experts=EXPERTS, size=4)
    pairs = sorted(
        (expert, token)
        for token, slots in enumerate(index_TS.tolist())
        for expert in slots
        if expert < EXPERTS
    )
    assert torch.equal(packed.rows_PH, hidden_TH[[token for _, token in pairs]])
    counts = [[0, 0] for _ in range(4)]
    for expert, _ in pairs:
        counts[expert // 2][expert % 2] += 1
    assert packed.counts_RL.tolist() == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_the_sum_has_the_bits_of_the_single_process_kernel(
    share: float, dtype: torch.dtype, weights: torch.dtype
) -> None:
    hidden_TH, index_TS, weight_TS = routed(share, dtype)
    weight_TS = weight_TS.to(weights)
    packed = lay_out(hidden_TH, index_TS, n_experts=EXPERTS, size=2)
    # Every pair's output is its own, so that a row out of place shows.
    rows_PH = torch.randn(packed.rows_PH.shape).to(dtype)
    rows_in_order = rows_PH[packed.place_P]
    weighted = (rows_in_order * weight_TS[packed.keep_TS][:, None]).to(dtype)
    expected = combine(weighted, packed.keep_TS).to(dtype)
    assert torch.equal(combine_rows(rows_PH, packed, weight_TS), expected)


def test_a_row_finds_its_token() -> None:
    hidden_TH, index_TS, _ = routed(0.5)
    packed = lay_out(hidden_TH, index_TS, n_experts=EXPERTS, size=2)
    ones = torch.ones(TOKENS, SLOTS)
    kept = packed.keep_TS.sum(dim=1, keepdim=True)
    torch.testing.assert_close(combine_rows(packed.rows_PH, packed, ones), hidden_TH * kept)
