"""The experts of each rank."""

from __future__ import annotations

import torch

from capmoe_eval.routing.placement import by_rank, rank_of


def test_ranks_and_their_experts() -> None:
    placed_RN = torch.tensor([[1, 3], [0, 2]])
    load_E = torch.tensor([10, 11, 12, 13])
    assert by_rank(load_E, 2, placed_RN).tolist() == [[11, 13], [10, 12]]
    assert by_rank(load_E, 2, None).tolist() == [[10, 11], [12, 13]]
    assert rank_of(torch.arange(4), 2, placed_RN).tolist() == [1, 0, 1, 0]
    assert rank_of(torch.arange(4), 2, None).tolist() == [0, 0, 1, 1]
