"""The tensors against the definition, and the invariants that every method promises."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from capmoe_eval.routing.assign import assign, bucket_limits
from capmoe_eval.routing.groups import group_tokens
from capmoe_eval.routing.reference import assign_reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capmoe_eval.routing.method import METHODS, Method
from capmoe_eval.routing.scores import Scores
from tests.routing.problems import Case, cases, decide, kept_pairs

WITHOUT_CAPACITY = ("baseline", "expert_drop", "oea", "xshare", "sere")
# MACS bounds weights and no numbers: test_weighted.py.
CAPPED = tuple(name for name in METHODS if name not in (*WITHOUT_CAPACITY, "device_drop", "macs"))


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), stream=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_tensors_agree_with_the_definition(
    name: str, data: st.DataObject, stream: tuple[int, int]
) -> None:
    case = data.draw(cases((name,)))
    assignment = decide(case, stream)
    pairs = kept_pairs(assignment.index_TS, assignment.keep_TS)
    assert len(pairs) == len(set(pairs)), "a pair is kept twice"
    assert set(pairs) == assign_reference(case.problem(stream), case.method)


@settings(max_examples=200, deadline=None)
@given(cases(METHODS))
def test_first_slots_are_the_routers_own_choice(case: Case) -> None:
    assert torch.equal(decide(case).index_TS[:, : case.top_k], case.scores.topk_TK)


@settings(max_examples=200, deadline=None)
@given(cases(CAPPED))
def test_no_bucket_exceeds_its_bound(case: Case) -> None:
    method = case.method
    assume(method.bound is not None)  # γ=∞ is the baseline
    limits = bucket_limits(method, case.groups, top_k=case.top_k, n_experts=case.n_experts)
    assignment = assign(case.scores, method, case.groups, image_T=case.image_T)
    local = case.n_experts // method.ep_size
    group = case.groups.group_T.tolist()
    load = Counter(
        (group[t], e if method.bound == "expert" else e // local)
        for t, e in kept_pairs(assignment.index_TS, assignment.keep_TS)
    )
    assert all(count <= limits[g] for (g, _), count in load.items())


@settings(max_examples=200, deadline=None)
@given(cases(("score", "order", "reverse_order", "random")))
def test_token_drop_drops_exactly_the_overflow(case: Case) -> None:
    """Equation 11 with the integer capacity: Σ max(N_j − C, 0), per group and expert."""
    method = case.method
    assume(method.bound is not None)  # γ=∞ is the baseline
    limits = bucket_limits(method, case.groups, top_k=case.top_k, n_experts=case.n_experts)
    assignment = assign(case.scores, method, case.groups, image_T=case.image_T)
    local = 1 if method.bound == "expert" else case.n_experts // method.ep_size
    group = case.groups.group_T.tolist()
    demand = Counter(
        (group[t], e // local) for t, row in enumerate(case.scores.topk_TK.tolist()) for e in row
    )
    overflow = sum(max(count - limits[g], 0) for (g, _), count in demand.items())
    assert int((~assignment.keep_TS).sum()) == overflow


@settings(max_examples=100, deadline=None)
@given(cases(("score", "order", "reverse_order", "random", "token_reroute"), gammas=(1.0,)))
def test_a_bound_that_never_binds_keeps_everything(case: Case) -> None:
    """γ=E makes the whole decision, unlike γ=∞, which is the baseline."""
    method = dataclasses.replace(case.method, gamma=float(case.n_experts))
    groups = group_tokens(case.counted_BS, ep_size=method.ep_size, scope=method.scope)
    assignment = assign(case.scores, method, groups, image_T=case.image_T)
    assert bool(assignment.keep_TS[:, : case.top_k].all())
    assert not bool(assignment.keep_TS[:, case.top_k :].any())


@settings(max_examples=100, deadline=None)
@given(cases(("score",)))
def test_zero_gamma_silences_every_expert(case: Case) -> None:
    method = Method("score", gamma=0.0, ep_size=case.method.ep_size)
    groups = group_tokens(case.counted_BS, ep_size=method.ep_size)
    assert not bool(assign(case.scores, method, groups).keep_TS.any())


@settings(max_examples=100, deadline=None)
@given(cases(("expanded_drop",)))
def test_expansion_never_hurts_an_underloaded_expert(case: Case) -> None:
    """Every expert serves at least as many tokens as under Token Drop, and at most C."""
    expanded = case.method
    assume(expanded.name == "expanded_drop")
    assume(not expanded.max_k)  # the cut to K experts may empty an expert again
    drop = Method(
        "score",
        gamma=expanded.gamma,
        ep_size=expanded.ep_size,
        scope=expanded.scope,
        granularity=expanded.granularity,
        rounding=expanded.rounding,
    )
    groups = group_tokens(case.counted_BS, ep_size=drop.ep_size, scope=drop.scope)
    before = assign(case.scores, drop, groups)
    after = assign(case.scores, expanded, case.groups, image_T=case.image_T)
    assert int(after.keep_TS.sum()) >= int(before.keep_TS.sum())


@settings(max_examples=100, deadline=None)
@given(cases(("expanded_drop",)))
def test_protected_topk_keep_what_token_drop_keeps(case: Case) -> None:
    assume(case.method.name == "expanded_drop")
    knobs = case.method.identity() | {"protect_topk": True, "max_k": False, "candidates": "global"}
    name = knobs.pop("method")
    gamma = float(knobs.pop("gamma"))
    for knob in ("m", "modality"):  # an added pair goes before one that is dropped first
        knobs.pop(knob, None)
    expanded = Method(name, gamma=gamma, **knobs)
    drop = Method(
        "score",
        gamma=gamma,
        **{k: knobs[k] for k in ("ep_size", "scope", "granularity", "rounding") if k in knobs},
    )
    groups = group_tokens(case.counted_BS, ep_size=drop.ep_size, scope=drop.scope)
    kept = assign(case.scores, drop, groups).keep_TS
    groups = group_tokens(case.counted_BS, ep_size=expanded.ep_size, scope=expanded.scope)
    own = assign(case.scores, expanded, groups).keep_TS[:, : case.top_k]
    assert torch.equal(own, kept)


FIRST = ("image_first", "text_first")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), modality=st.sampled_from(FIRST))
def test_a_protected_pair_is_dropped_only_where_no_other_is_kept(
    data: st.DataObject, modality: str
) -> None:
    case = data.draw(cases(CAPPED, gammas=[0.1, 0.5, 0.75, 1.0, 1.5]))
    assume(not case.method.max_k)  # which drops pairs of a token for that token's own sake
    method = dataclasses.replace(case.method, modality=modality)
    assume(method.modality == modality)  # not the baseline
    groups = group_tokens(case.counted_BS, ep_size=method.ep_size, scope=method.scope)
    assignment = assign(case.scores, method, groups, image_T=case.image_T)
    kept = set(kept_pairs(assignment.index_TS, assignment.keep_TS))
    sharing = 1 if method.bound == "expert" else case.n_experts // method.ep_size
    group, image = groups.group_T.tolist(), case.image_T.tolist()
    keeps_other = {
        (group[t], e // sharing) for t, e in kept if image[t] == (modality == "image_first")
    }
    candidates = {(t, e) for t, row in enumerate(case.scores.topk_TK.tolist()) for e in row}
    if method.candidate_rule == "global":
        eligible_TE = torch.ones_like(case.scores.score_TE, dtype=torch.bool)
        if case.scores.eligible_TE is not None:
            eligible_TE = case.scores.eligible_TE
        candidates |= {(t, e) for t, e in eligible_TE.nonzero().tolist()}
    for t, e in candidates - kept:
        if image[t] == (modality == "text_first"):
            assert (group[t], e // sharing) not in keeps_other


@settings(max_examples=150, deadline=None)
@given(data=st.data(), modality=st.sampled_from(FIRST), image=st.booleans())
def test_a_priority_changes_nothing_among_tokens_of_one_modality(
    data: st.DataObject, modality: str, image: bool
) -> None:
    case = data.draw(cases(METHODS))
    first = dataclasses.replace(case.method, modality=modality)
    image_T = torch.full_like(case.image_T, image)
    decided = [
        assign(
            case.scores,
            method,
            group_tokens(case.counted_BS, ep_size=method.ep_size, scope=method.scope),
            image_T=image_T,
            calibrated=case.similarity_EE,
        )
        for method in (first, dataclasses.replace(first, modality="uniform"))
    ]
    one, other = (set(kept_pairs(each.index_TS, each.keep_TS)) for each in decided)
    assert one == other


@settings(max_examples=150, deadline=None)
@given(data=st.data(), modality=st.sampled_from(FIRST))
def test_a_priority_subtracts_one_from_scores_below_one(data: st.DataObject, modality: str) -> None:
    """As the released code has it: the ranking by score - 1, the weights by the score."""
    case = data.draw(cases(("score", "expanded_drop", "token_reroute")))
    assume(case.method.keep == "score" and float(case.scores.score_TE.max()) < 1)
    # The released code protects no top-k. Token Reroute goes on with the scores themselves.
    method = dataclasses.replace(case.method, modality=modality, protect_topk=False)
    groups = group_tokens(case.counted_BS, ep_size=method.ep_size, scope=method.scope)
    assignment = assign(case.scores, method, groups, image_T=case.image_T)
    uniform = dataclasses.replace(method, modality="uniform")
    plain = Case(case.scores, groups, case.counted_BS, uniform, case.image_T).problem()
    lowered = [image == (modality == "image_first") for image in plain.image]
    score = [[s - one for s in row] for row, one in zip(plain.score, lowered, strict=True)]
    kept = assign_reference(dataclasses.replace(plain, score=score), uniform)
    assert set(kept_pairs(assignment.index_TS, assignment.keep_TS)) == kept


def test_a_modality_goes_first_whatever_its_scores() -> None:
    scores = Scores(torch.tensor([[0.9], [0.8], [0.2], [0.1]]), torch.zeros(4, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool))
    image_T = torch.tensor([True, True, False, False])

    def kept(keep: str, modality: str, gamma: float) -> list[int]:
        method = Method(keep, gamma=gamma, modality=modality)
        assignment = assign(scores, method, groups, image_T=image_T)
        return assignment.keep_TS[:, 0].nonzero().squeeze(1).tolist()

    assert kept("score", "uniform", 0.5) == kept("score", "text_first", 0.5) == [0, 1]
    assert kept("score", "image_first", 0.5) == [2, 3]
    assert kept("score", "image_first", 0.75) == [0, 2, 3]
    assert kept("reverse_order", "image_first", 0.75) == [1, 2, 3]
    assert kept("order", "text_first", 0.75) == [0, 1, 2]


def test_all_equal_scores_keep_the_lowest_tokens() -> None:
    scores = Scores(torch.full((6, 2), 0.5), torch.zeros(6, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 6, dtype=torch.bool))
    kept = assign(scores, Method("score", gamma=1.0), groups).keep_TS
    assert kept[:, 0].tolist() == [True, True, True, False, False, False]


def test_order_and_reverse_order_keep_opposite_ends() -> None:
    scores = Scores(torch.rand(5, 1), torch.zeros(5, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 5, dtype=torch.bool))
    first = assign(scores, Method("order", gamma=0.4), groups).keep_TS[:, 0]
    last = assign(scores, Method("reverse_order", gamma=0.4), groups).keep_TS[:, 0]
    assert first.tolist() == [True, True, False, False, False]
    assert last.tolist() == [False, False, False, True, True]


def test_random_depends_on_seed_layer_and_forward_alone() -> None:
    scores = Scores(torch.rand(200, 4), torch.zeros(200, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 200, dtype=torch.bool))

    def kept(seed: int, stream: tuple[int, int]) -> list[bool]:
        torch.rand(1)  # the global generator plays no part
        method = Method("random", gamma=1.0, seed=seed)
        return assign(scores, method, groups, stream=stream).keep_TS[:, 0].tolist()

    assert kept(0, (1, 2)) == kept(0, (1, 2))
    assert (
        len({tuple(kept(s, (layer, f))) for s in (0, 1) for layer in (0, 1) for f in (0, 1)}) == 8
    )


def test_random_keeps_every_token_equally_often() -> None:
    scores = Scores(torch.rand(40, 2), torch.zeros(40, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 40, dtype=torch.bool))
    times = torch.zeros(40)
    for forward in range(400):
        times += assign(scores, Method("random", gamma=1.0), groups, stream=(0, forward)).keep_TS[
            :, 0
        ]
    # Each token is kept with probability 1/2: 200 of 400, standard deviation 10.
    assert float(times.min()) > 150 and float(times.max()) < 250


def test_expert_drop_silences_one_of_eight_and_breaks_ties_low() -> None:
    topk_TK = torch.tensor([[0], [1], [2], [3], [4], [5], [7], [7]])
    scores = Scores(torch.rand(8, 8), topk_TK)
    groups = group_tokens(torch.ones(1, 8, dtype=torch.bool))
    assert bool(assign(scores, Method("expert_drop"), groups).keep_TS.all())  # expert 6 was idle
    busy = Scores(torch.rand(8, 8), torch.arange(8)[:, None])
    kept = assign(busy, Method("expert_drop"), groups).keep_TS[:, 0]
    assert kept.tolist() == [False] + [True] * 7


def test_reroute_sends_overflow_to_the_next_best_expert() -> None:
    score_TE = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.8, 0.1, 0.1]])
    scores = Scores(score_TE, torch.zeros(3, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 3, dtype=torch.bool))
    one = assign(scores, Method("token_reroute", gamma=1.0, rounds=1), groups)
    assert kept_pairs(one.index_TS, one.keep_TS) == [(2, 0)]
    two = assign(scores, Method("token_reroute", gamma=1.0, rounds=2), groups)
    assert kept_pairs(two.index_TS, two.keep_TS) == [(0, 1), (2, 0)]
    three = assign(scores, Method("token_reroute", gamma=1.0, rounds=3), groups)
    assert kept_pairs(three.index_TS, three.keep_TS) == [(0, 1), (1, 2), (2, 0)]
    most = assign(scores, Method("token_reroute", gamma=1.0, rounds=10**9), groups)  # it ends
    assert kept_pairs(most.index_TS, most.keep_TS) == kept_pairs(three.index_TS, three.keep_TS)


def test_local_candidates_are_those_of_the_rank_also_per_sequence() -> None:
    """With a group per sequence, group 3 of rank 1 still has the experts of rank 1."""
    score_TE = torch.full((4, 4), 0.25)
    scores = Scores(score_TE, torch.tensor([[2], [3], [0], [1]]))
    method = Method("expanded_drop", gamma=100.0, ep_size=2, scope="sequence")
    groups = group_tokens(torch.ones(4, 1, dtype=torch.bool), ep_size=2, scope="sequence")
    assignment = assign(scores, method, groups)
    assert kept_pairs(assignment.index_TS, assignment.keep_TS) == [
        *((0, 2), (0, 0), (0, 1), (1, 3), (1, 0), (1, 1)),
        *((2, 0), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)),
    ]


def test_global_candidates_are_expert_choice_routing() -> None:
    """All experts are candidates: each keeps its C best tokens, γ·K experts per token."""
    score_TE = torch.rand(12, 4).softmax(dim=1)
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    groups = group_tokens(torch.ones(3, 4, dtype=torch.bool))
    method = Method("expanded_drop", gamma=1.0, candidates="global")
    assignment = assign(scores, method, groups)
    pairs = set(kept_pairs(assignment.index_TS, assignment.keep_TS))
    best = score_TE.topk(6, dim=0).indices  # C = 12·2/4 = 6
    assert pairs == {(int(t), e) for e in range(4) for t in best[:, e]}


def test_uneven_experts_are_refused_by_name() -> None:
    scores = Scores(torch.rand(4, 60), torch.zeros(4, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool), ep_size=8)
    with pytest.raises(ValueError, match="ep_size=8: 60 experts cannot be spread evenly"):
        assign(scores, Method("score", gamma=1.0, ep_size=8), groups)
