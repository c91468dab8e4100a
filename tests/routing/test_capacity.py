"""Capacities, the groups of tokens that share them, and the experts of ranks."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.routing import definition
from capmoe_eval.routing.capacity import capacity
from capmoe_eval.routing.decision import Scores, by_rank, group_tokens, rank_of
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method
from tests.routing.problems import GAMMAS, assign, one_group


@given(
    gamma=st.sampled_from(GAMMAS[:-1]) | st.decimals(0, 9, places=3).map(float),
    tokens=st.integers(0, 5000),
    top_k=st.integers(1, 8),
    local=st.integers(1, 16),
    ranks=st.integers(1, 8),
    granularity=st.sampled_from(["expert", "device"]),
    rounding=st.sampled_from(["ceil", "floor"]),
)
def test_a_capacity_is_the_exact_quotient_rounded(
    gamma: float, tokens: int, top_k: int, local: int, ranks: int, granularity: str, rounding: str
) -> None:
    n_experts, sharing = local * ranks, local if granularity == "device" else 1
    exact = sharing * Fraction(str(gamma)) * tokens * top_k / n_experts
    limit = capacity(gamma, tokens, top_k, n_experts, rounding=rounding, experts=sharing)
    rounded = math.ceil(exact) if rounding == "ceil" else math.floor(exact)
    assert limit == min(rounded, sharing * tokens)
    method = TokenDrop(gamma=1.0, ep_size=ranks, granularity=granularity, rounding=rounding)
    sizes = {"top_k": top_k, "n_experts": n_experts}
    assert definition.limits(method, gamma, np.array([tokens]), **sizes) == [limit]


def test_drops_and_padding_of_a_textbook_s_batch() -> None:
    """Its output 17.7.2: top-1 routing, half of the experts more attractive."""
    printed = {
        1.0: [(512, 1.55, 1.55), (640, 0.0, 20.0), (768, 0.0, 33.33), (1024, 0.0, 50.0)],
        6.0: [(512, 36.17, 36.17), (640, 23.24, 38.59), (768, 10.44, 40.29), (1024, 0.0, 50.0)],
    }
    rng, n_tokens, n_experts = np.random.default_rng(0), 8192, 16
    for skew, rows in printed.items():
        for gamma, expected in zip((1.0, 1.25, 1.5, 2.0), rows, strict=True):
            chance = np.array([skew] * 8 + [1.0] * 8)
            expert_T1 = torch.from_numpy(
                rng.choice(n_experts, size=(n_tokens, 1), p=chance / chance.sum())
            )
            scores = Scores(torch.zeros(n_tokens, n_experts).scatter(1, expert_T1, 1.0), expert_T1)
            kept = assign(scores, create_method("order", gamma), one_group(n_tokens)).keep_TS
            limit, served = capacity(gamma, n_tokens, 1, n_experts), int(kept.sum())
            drop_rate, pad_waste = 1 - served / n_tokens, 1 - served / (n_experts * limit)
            assert (limit, round(100 * drop_rate, 2), round(100 * pad_waste, 2)) == expected


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


def test_ranks_without_sequences_are_empty_groups() -> None:
    assert group_tokens(torch.ones(2, 3, dtype=torch.bool), ep_size=4).tokens == (3, 0, 3, 0)
