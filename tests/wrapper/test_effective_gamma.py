"""The capacity that was applied over the mean load, against loops over groups and buckets."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.event import ExpertsCall, LayerForward, RouterCall
from capmoe_eval.wrapper.gates import Gate, GateRecipe
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.loads import Loads
from capmoe_eval.wrapper.plan import GAMMA_GRID, ForwardPlan

TOP_K = 2
Batches = list[list[int]]  # the numbers of tokens of the sequences of each batch


def metered(method: Method, n_experts: int, batches: Batches) -> dict[str, Any]:
    """The report of a layer that was called with these batches."""
    nothing = torch.nn.Identity()
    gate = Gate(GateRecipe(), nothing)
    layer = MoeLayer("layers.0", nothing, nothing, gate, n_experts, TOP_K)
    loads = Loads([layer], method)
    for number, lengths in enumerate(batches):
        counted_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        plan = ForwardPlan(method, number, counted_BS=counted_BS, decode=False)
        chosen_NK = torch.arange(counted_BS.numel() * TOP_K).view(-1, TOP_K) % n_experts
        hidden_NH, weight_NK = torch.zeros(len(chosen_NK), 1), torch.ones(chosen_NK.shape)
        logits_NE = torch.zeros(len(chosen_NK), n_experts)
        router = RouterCall(layer, plan.groups, hidden_NH, logits_NE, weight_NK, chosen_NK)
        experts = ExpertsCall(hidden_NH, chosen_NK, weight_NK)
        loads.see(LayerForward(plan, 0, layer, method, None, router, None, experts, None))
    return loads.layer(0)


def by_loops(
    method: Method, n_experts: int, batches: Batches, gamma: float
) -> tuple[Fraction, Fraction]:
    """The effective capacity factor and the mean load, bucket by bucket."""
    sharing = n_experts // method.ep_size if method.granularity == "device" else 1
    capacities, mean_loads = [], []
    for lengths in batches:
        groups: dict[int, int] = {}
        for sequence, tokens in enumerate(lengths):
            rank = sequence * method.ep_size // len(lengths)
            group = sequence if method.scope == "sequence" else rank
            groups[group] = groups.get(group, 0) + tokens
        for tokens in groups.values():
            for _ in range(n_experts // sharing):
                mean = Fraction(sharing * tokens * TOP_K, n_experts)
                exact = Fraction(str(gamma)) * mean
                rounded = math.ceil(exact) if method.rounding == "ceil" else math.floor(exact)
                capacities.append(min(rounded, sharing * tokens))
                mean_loads.append(mean)
    buckets = sum(mean > 0 for mean in mean_loads)
    return sum(capacities, Fraction()) / sum(mean_loads), sum(mean_loads) / buckets


@settings(deadline=None)
@given(
    gamma=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.1, 1.5, 3.0, 9.0]),
    ep_size=st.sampled_from([1, 2, 4]),
    local=st.integers(1, 4),
    scope=st.sampled_from(["batch", "sequence"]),
    granularity=st.sampled_from(["expert", "device"]),
    rounding=st.sampled_from(["ceil", "floor"]),
    batches=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), min_size=1, max_size=3
    ),
)
def test_it_is_the_sum_of_capacities_over_the_sum_of_mean_loads(
    gamma: float, ep_size: int, local: int, batches: Batches, **knobs: str
) -> None:
    n_experts = max(ep_size * local, TOP_K)
    method = create_method("score", gamma, ep_size=ep_size, **knobs)
    report = metered(method, n_experts, batches)
    for at, effective in zip(GAMMA_GRID, report["grid"]["effective_gamma"], strict=True):
        expected = float(by_loops(method, n_experts, batches, at)[0])
        assert effective == pytest.approx(expected, abs=1e-6)  # six decimals are recorded
    effective_gamma = report["effective_gamma"]
    if method.is_stock:  # a bound of devices that cannot bind is the baseline
        assert effective_gamma is None
        return
    assert method.factor is not None
    assert method.factor.uniform == gamma
    expected, mean_load = by_loops(method, n_experts, batches, gamma)
    assert (effective_gamma, report["mean_load"]) == pytest.approx(
        (float(expected), float(mean_load))
    )
    # With many tokens per bucket it is γ: rounding moves a capacity by less than one token. A
    # bucket holds no more than all tokens of its group, E/K mean loads.
    nominal = min(gamma, n_experts / TOP_K)
    if method.rounding == "ceil":
        assert nominal - 1e-9 <= effective_gamma < nominal + 1 / report["mean_load"]
    else:
        assert nominal - 1 / report["mean_load"] < effective_gamma <= nominal + 1e-9
