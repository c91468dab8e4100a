"""Capacities, the groups of tokens that share them, and the experts of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.routing.capacity import capacity
from capmoe_eval.routing.decision import by_rank, rank_of
from capmoe_eval.routing.tokens import group_tokens


@pytest.mark.parametrize(
    ("gamma", "tokens", "top_k", "n_experts", "rounding", "expected"),
    [
        (1.0, 4, 8, 64, "ceil", 1),  # the semantics' example: int() would drop everything
        (1.0, 4, 8, 64, "floor", 0),
        (0.0, 100, 8, 64, "ceil", 0),
        (0.01, 4, 1, 64, "ceil", 1),
        (1.5, 4096, 2, 8, "ceil", 1536),  # the textbook's exercise
        (1.1, 100, 1, 1, "ceil", 100),  # 110 clamped to T
        (1.1, 200, 1, 2, "ceil", 110),  # 1.1·100 is 110.00000000000001 in binary
        (math.inf, 7, 2, 8, "ceil", 7),
        (100.0, 7, 2, 8, "ceil", 7),
    ],
)
def test_capacity(
    gamma: float, tokens: int, top_k: int, n_experts: int, rounding: str, expected: int
) -> None:
    assert capacity(gamma, tokens, top_k, n_experts, rounding=rounding) == expected


@given(
    st.sampled_from([0.0, 0.3, 1.0, 1.7, math.inf]),
    st.integers(0, 500),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_device_capacity_is_at_most_the_sum_of_expert_capacities(
    gamma: float, tokens: int, top_k: int, local: int
) -> None:
    n_experts = 8 * local
    of_expert = capacity(gamma, tokens, top_k, n_experts)
    device = capacity(gamma, tokens, top_k, n_experts, experts=local)
    assert device <= local * of_expert


def test_ranks_and_their_experts() -> None:
    placed_RN = torch.tensor([[1, 3], [0, 2]])
    load_E = torch.tensor([10, 11, 12, 13])
    assert by_rank(load_E, 2, placed_RN).tolist() == [[11, 13], [10, 12]]
    assert by_rank(load_E, 2, None).tolist() == [[10, 11], [12, 13]]
    assert rank_of(torch.arange(4), 2, placed_RN).tolist() == [1, 0, 1, 0]
    assert rank_of(torch.arange(4), 2, None).tolist() == [0, 0, 1, 1]


def test_sequences_go_to_ranks_in_contiguous_blocks() -> None:
    counted_BS = torch.ones(5, 2, dtype=torch.bool)
    counted_BS[4, 1] = False
    groups = group_tokens(counted_BS, ep_size=2)
    # floor(b·2/5) = 0 0 0 1 1
    assert groups.rank_T.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert groups.tokens == (6, 3)
    assert groups.rows_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_sequence_scope_keeps_the_rank_of_the_sequence() -> None:
    groups = group_tokens(torch.ones(4, 3, dtype=torch.bool), ep_size=2, scope="sequence")
    assert groups.tokens == (3, 3, 3, 3)
    assert groups.group_T.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert groups.rank_T.tolist() == [0] * 6 + [1] * 6


def test_ranks_without_sequences_are_empty_groups() -> None:
    assert group_tokens(torch.ones(2, 3, dtype=torch.bool), ep_size=4).tokens == (3, 0, 3, 0)
