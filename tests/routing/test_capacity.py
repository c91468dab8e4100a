"""A capacity is γ times the mean load, rounded without an error of floating-point numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.routing import definition
from capmoe_eval.routing.capacity import capacity
from capmoe_eval.routing.methods.token_drop import TokenDrop
from tests.routing.problems import GAMMAS


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
