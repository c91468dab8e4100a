"""The sets of experts that OEA and XShare activate, and rerouting under a budget of devices."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from capmoe_eval.routing.activation import (
    activation_budget,
    batch_demand,
    best_own,
    budgeted_units,
    expert_set,
)
from capmoe_eval.routing.assign import assign, batch_counts, bucket_limits
from capmoe_eval.routing.groups import group_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores
from tests.routing.problems import Case, cases, decide, kept_pairs

# Three tokens, K = 2. The tokens' best experts are 0, 0 and 2; the second best 1, 3 and 1.
SCORES = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.6, 0.05, 0.1, 0.25], [0.05, 0.3, 0.4, 0.25]])


def kept(method: Method, score_TE: torch.Tensor = SCORES) -> list[tuple[int, int]]:
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    groups = group_tokens(torch.ones(1, len(score_TE), dtype=torch.bool))
    assignment = assign(scores, method, groups)
    return sorted(kept_pairs(assignment.index_TS, assignment.keep_TS))


def test_oea_fills_slots_with_experts_that_others_need() -> None:
    """Experts 0 and 2 are active; every token's second slot takes the other one of them."""
    assert kept(Method("oea", k0=1)) == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    assert kept(Method("oea", k0=2)) == kept(Method("baseline"))


def test_xshare_takes_the_highest_sums_after_the_tokens_best() -> None:
    """The sums are 1.15, 0.65, 0.65 and 0.55; the lower of two equal ones goes first."""
    assert kept(Method("xshare", k0=0, expert_budget=0.25)) == [(0, 0), (1, 0), (2, 0)]
    by_sum = kept(Method("xshare", k0=0, expert_budget=0.5))
    assert by_sum == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    best_first = kept(Method("xshare", k0=1, expert_budget=0.5))  # 2 is the third token's best
    assert best_first == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    on_ranks = Method("xshare", k0=0, expert_budget=0.5, ep_size=2, granularity="device")
    assert {expert for _, expert in kept(on_ranks)} == {0, 2}  # one of each rank


# In binary floats 0.28·25 and 0.14·50 are above 7, and 0.07·100 is, too.
@pytest.mark.parametrize(
    ("share", "experts", "ranks"), [(0.28, 25, 1), (0.07, 100, 1), (0.28, 50, 2)]
)
def test_the_share_of_experts_is_the_decimal_that_was_written(
    share: float, experts: int, ranks: int
) -> None:
    unit = {"ep_size": ranks, "granularity": "device" if ranks > 1 else "expert"}
    assert activation_budget(Method("xshare", expert_budget=share, **unit), experts) == 7


def test_a_token_takes_no_expert_that_its_groups_rule_out() -> None:
    """Experts 0 and 2 are active; the second token may not use 2, the best of those for it."""
    scores = Scores(
        torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.3, 0.2, 0.4, 0.1], [0.1, 0.1, 0.5, 0.3]]),
        torch.tensor([[0, 2], [0, 1], [2, 3]]),
        eligible_TE=torch.tensor(
            [[True] * 4, [True, True, False, False], [False, False, True, True]]
        ),
    )
    groups = group_tokens(torch.ones(1, 3, dtype=torch.bool))
    for method in (Method("oea", k0=1), Method("xshare", k0=1, expert_budget=0.5)):
        found = assign(scores, method, groups)
        assert sorted(kept_pairs(found.index_TS, found.keep_TS)) == [(0, 0), (0, 2), (1, 0), (2, 2)]


@settings(max_examples=120, deadline=None)
@given(cases(("oea", "xshare")))
def test_what_is_activated_is_bounded_and_the_best_are_kept(case: Case) -> None:
    method, scores = case.method, case.scores
    assignment = assign(scores, method, case.groups)
    pairs = kept_pairs(assignment.index_TS, assignment.keep_TS)
    if method.is_stock:  # XShare with a budget of all experts
        assert bool(assignment.keep_TS.all())
        return
    assert max(Counter(token for token, _ in pairs).values(), default=0) <= case.top_k
    active = {expert for _, expert in pairs}
    best_TK = best_own(scores, method.k0)
    best = set(scores.topk_TK[best_TK].tolist())
    lost_TK = best_TK & ~assignment.keep_TS[:, : case.top_k]
    if method.name == "oea":
        assert active == best
        assert not bool(lost_TK.any())
        return
    local, budget = (
        case.n_experts // budgeted_units(method),
        activation_budget(method, case.n_experts),
    )
    assert max(Counter(expert // local for expert in active).values(), default=0) <= budget
    if max(Counter(expert // local for expert in best).values(), default=0) <= budget:
        assert not bool(lost_TK.any())
    if method.k0 == 0:  # no set of that size has a higher sum
        demand_2E = batch_demand(scores, 0)
        chosen_U = (demand_2E[1] * expert_set(demand_2E, method)).view(-1, local).sum(dim=1)
        most_U = demand_2E[1].view(-1, local).sort(dim=1, descending=True).values[:, :budget]
        assert torch.equal(chosen_U, most_U.sum(dim=1))


@settings(max_examples=60, deadline=None)
@given(cases(("expert_drop", "oea", "xshare", "sere")), st.data())
def test_processes_that_add_their_counts_decide_as_one(case: Case, data: st.DataObject) -> None:
    if not case.method.decides_by_batch:
        return
    cut = data.draw(st.integers(0, len(case.scores.topk_TK)))
    optional = (case.scores.choice_TE, case.scores.eligible_TE)
    parts = [
        Scores(
            case.scores.score_TE[rows],
            case.scores.topk_TK[rows],
            *(None if tensor is None else tensor[rows] for tensor in optional),
        )
        for rows in (slice(cut), slice(cut, None))
    ]
    counts = batch_counts(parts[0], case.method) + batch_counts(parts[1], case.method)
    whole = decide(case)
    for part, rows in zip(parts, (slice(cut), slice(cut, None)), strict=True):
        own = assign(part, case.method, case.groups, counts=counts, calibrated=case.similarity_EE)
        assert kept_pairs(own.index_TS, own.keep_TS) == kept_pairs(
            whole.index_TS[rows], whole.keep_TS[rows]
        )


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
    method = Method("token_reroute", gamma, **knobs)
    groups = group_tokens(torch.ones(ranks, n_tokens // ranks, dtype=torch.bool), ep_size=ranks)
    assignment = assign(scores, method, groups)
    pairs = kept_pairs(assignment.index_TS, assignment.keep_TS)
    assert set(Counter(token for token, _ in pairs).values()) == {top_k}
    limits = bucket_limits(method, groups, top_k=top_k, n_experts=n_experts)
    load = Counter((int(groups.group_T[token]), expert // 4) for token, expert in pairs)
    assert all(count <= limits[group] for (group, _), count in load.items())
    full = {device for device in load if load[device] == limits[device[0]]}
    for token in range(n_tokens):
        own = {expert for t, expert in pairs if t == token}
        worst = min(float(score_TE[token, expert]) for expert in own)
        for expert in set(range(n_experts)) - own:  # a better one is passed over where it is full
            if float(score_TE[token, expert]) > worst:
                assert (int(groups.group_T[token]), expert // 4) in full
