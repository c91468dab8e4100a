"""Token Reroute with a budget of devices is the rerouting of vLLM's issue 50151."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.routing.methods.token_reroute import TokenReroute
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.routing.problems import assign, kept_pairs


@pytest.mark.parametrize("gamma", [1.0, 1.5])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    ranks=st.sampled_from([2, 4]),
    top_k=st.integers(1, 4),
    skew=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_token_reroute_by_device_is_the_reroute_of_vllm_50151(
    gamma: float, seed: int, ranks: int, top_k: int, skew: float
) -> None:
    """No device exceeds γ times its mean load, and every token still has K experts.

    It holds for γ ≥ 1 and devices of at least K experts, once rounds no longer reject anything:
    a token that lacks an expert of a device was rejected by it, so that the device is full, and
    with γ ≥ 1 not all devices can be full before all tokens have K experts. A token that changes
    takes its best experts that are left.
    """
    generator = torch.Generator().manual_seed(seed)
    n_experts, n_tokens = 4 * ranks, 12
    logits_TE = torch.rand(n_tokens, n_experts, generator=generator)
    logits_TE[:, :4] += skew  # the first device is popular
    score_TE = logits_TE.softmax(dim=1)
    scores = Scores(score_TE, score_TE.topk(top_k, dim=1).indices)
    knobs = {"ep_size": ranks, "granularity": "device", "rounds": n_tokens * n_experts}
    method = TokenReroute(gamma=gamma, **knobs)  # type: ignore[arg-type]
    groups = group_tokens(torch.ones(ranks, n_tokens // ranks, dtype=torch.bool), ep_size=ranks)
    assignment = assign(scores, method, groups)
    pairs = kept_pairs(assignment)
    assert set(Counter(token for token, _ in pairs).values()) == {top_k}
    limits = method.limits(groups.tokens, top_k=top_k, n_experts=n_experts)
    load = Counter((int(groups.group_T[token]), expert // 4) for token, expert in pairs)
    assert all(count <= limits[group] for (group, _), count in load.items())
    full = {device for device in load if load[device] == limits[device[0]]}
    for token in range(n_tokens):
        own = {expert for t, expert in pairs if t == token}
        worst = min(float(score_TE[token, expert]) for expert in own)
        for expert in set(range(n_experts)) - own:  # a better one is passed over where it is full
            if float(score_TE[token, expert]) > worst:
                assert (int(groups.group_T[token]), expert // 4) in full
