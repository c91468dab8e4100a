"""The tensors against the definition, and the invariants that every method promises."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.context import LayerContext
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.methods.expert_drop import ExpertDrop
from capmoe_eval.routing.methods.token_drop import (
    OrderDrop,
    RandomDrop,
    ReverseOrderDrop,
    TokenDrop,
)
from capmoe_eval.routing.methods.token_reroute import TokenReroute
from capmoe_eval.routing.mixins import Bounded
from capmoe_eval.routing.registry import create_method, method_class, method_names
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import TokenGroups, group_tokens
from tests.routing.problems import Case, assign, cases, decide, kept_pairs
from tests.routing.reference import assign_reference

METHODS = method_names()
BOUNDED = [name for name in METHODS if issubclass(method_class(name), Bounded)]


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), stream=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_tensors_agree_with_the_definition(
    name: str, data: st.DataObject, stream: tuple[int, int]
) -> None:
    case = data.draw(cases((name,)))
    assignment = decide(case, stream)
    pairs = kept_pairs(assignment)
    assert len(pairs) == len(set(pairs)), "a pair is kept twice"
    assert set(pairs) == assign_reference(case.problem(stream), case.method)


@settings(max_examples=200, deadline=None)
@given(cases(METHODS))
def test_first_slots_are_the_routers_own_choice(case: Case) -> None:
    assert torch.equal(decide(case).index_TS[:, : case.top_k], case.scores.topk_TK)


@settings(max_examples=200, deadline=None)
@given(cases(BOUNDED))
def test_no_bucket_exceeds_its_bound(case: Case) -> None:
    method = case.method
    assume(isinstance(method, Bounded))  # γ=∞ is the baseline
    limits = method.limits(case.groups.tokens, top_k=case.top_k, n_experts=case.n_experts)
    assignment = decide(case)
    local = case.n_experts // method.ep_size
    group = case.groups.group_T.tolist()
    load = Counter(
        (group[t], e if method.unit == "expert" else e // local) for t, e in kept_pairs(assignment)
    )
    assert all(count <= limits[g] for (g, _), count in load.items())


@settings(max_examples=200, deadline=None)
@given(cases(("score", "order", "reverse_order", "random")))
def test_token_drop_drops_exactly_the_overflow(case: Case) -> None:
    """Equation 11 with the integer capacity: Σ max(N_j − C, 0), per group and expert."""
    method = case.method
    assume(isinstance(method, Bounded))  # γ=∞ is the baseline
    limits = method.limits(case.groups.tokens, top_k=case.top_k, n_experts=case.n_experts)
    assignment = decide(case)
    local = 1 if method.unit == "expert" else case.n_experts // method.ep_size
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
    assume(not case.method.is_stock)
    assignment = decide(case.of(case.method.at(float(case.n_experts))))
    assert bool(assignment.keep_TS[:, : case.top_k].all())
    assert not bool(assignment.keep_TS[:, case.top_k :].any())


@settings(max_examples=100, deadline=None)
@given(cases(("score",)))
def test_at_zero_gamma_no_expert_computes_anything(case: Case) -> None:
    zero = case.of(TokenDrop(gamma=0.0, ep_size=case.method.ep_size))
    assert not bool(decide(zero).keep_TS.any())


@settings(max_examples=100, deadline=None)
@given(cases(("expanded_drop",)))
def test_expansion_never_hurts_an_underloaded_expert(case: Case) -> None:
    """Every expert serves at least as many tokens as under Token Drop, and at most C."""
    expanded = case.method
    assume(isinstance(expanded, ExpandedDrop))
    assume(not expanded.max_k)  # the cut to K experts may empty an expert again
    drop = expanded.converted(TokenDrop, modality="uniform")
    before, after = decide(case.of(drop)), decide(case)
    assert int(after.keep_TS.sum()) >= int(before.keep_TS.sum())


@settings(max_examples=100, deadline=None)
@given(cases(("expanded_drop",)))
def test_protected_topk_keep_what_token_drop_keeps(case: Case) -> None:
    assume(isinstance(case.method, ExpandedDrop))
    # An added pair goes before one of a modality that is dropped first.
    knobs = {"protect_topk": True, "max_k": False, "candidates": "global", "modality": "uniform"}
    expanded = dataclasses.replace(case.method, **knobs)  # type: ignore[type-var]
    kept = decide(case.of(expanded.converted(TokenDrop))).keep_TS
    assert torch.equal(decide(case.of(expanded)).keep_TS[:, : case.top_k], kept)


FIRST = ("image_first", "text_first")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), modality=st.sampled_from(FIRST))
def test_a_protected_pair_is_dropped_only_where_no_other_is_kept(
    data: st.DataObject, modality: str
) -> None:
    case = data.draw(cases(BOUNDED, gammas=[0.1, 0.5, 0.75, 1.0, 1.5]))
    method = case.method
    assume(not method.is_stock)
    assume(not method.max_k)  # which drops pairs of a token for that token's own sake
    case = case.of(dataclasses.replace(method, modality=modality))  # type: ignore[type-var]
    kept = set(kept_pairs(decide(case)))
    sharing = 1 if method.unit == "expert" else case.n_experts // method.ep_size
    group, image = case.groups.group_T.tolist(), case.image_T.tolist()
    keeps_other = {
        (group[t], e // sharing) for t, e in kept if image[t] == (modality == "image_first")
    }
    candidates = {(t, e) for t, row in enumerate(case.scores.topk_TK.tolist()) for e in row}
    if isinstance(method, ExpandedDrop) and method.candidates == "global":
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
    case = data.draw(cases(BOUNDED))
    assume(not case.method.is_stock)
    case = dataclasses.replace(case, image_T=torch.full_like(case.image_T, image))
    first, uniform = (
        decide(case.of(dataclasses.replace(case.method, modality=name)))  # type: ignore[type-var]
        for name in (modality, "uniform")
    )
    assert set(kept_pairs(first)) == set(kept_pairs(uniform))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), modality=st.sampled_from(FIRST))
def test_a_priority_subtracts_one_from_scores_below_one(data: st.DataObject, modality: str) -> None:
    """As the released code has it: the ranking by score - 1, the weights by the score."""
    case = data.draw(cases(("score", "expanded_drop", "token_reroute")))
    method = case.method
    assume(not method.is_stock and float(case.scores.score_TE.max()) < 1)
    # The released code protects no top-k. Token Reroute goes on with the scores themselves.
    knobs = {"protect_topk": False} if isinstance(method, ExpandedDrop) else {}
    case = case.of(dataclasses.replace(method, modality=modality, **knobs))  # type: ignore[type-var]
    uniform = dataclasses.replace(case.method, modality="uniform")  # type: ignore[type-var]
    plain = case.of(uniform).problem()
    lowered = [image == (modality == "image_first") for image in plain.image]
    score = [[s - less for s in row] for row, less in zip(plain.score, lowered, strict=True)]
    kept = assign_reference(dataclasses.replace(plain, score=score), uniform)
    assert set(kept_pairs(decide(case))) == kept


WITHOUT_CAPACITY = [
    name
    for name in METHODS
    if not (method_class(name).is_stock or "gamma" in declared_knobs(method_class(name)))
]


@settings(max_examples=100, deadline=None)
@given(cases(WITHOUT_CAPACITY), st.data())
def test_processes_that_add_their_counts_decide_as_one(case: Case, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(case.scores.topk_TK)))
    rows = slice(cut), slice(cut, None)
    totals: list[torch.Tensor] = []
    while True:  # until each of the sums that a decision asks for is that of both parts
        asked: tuple[list[torch.Tensor], ...] = ([], [])
        decided = [
            _decide_part(case, part, totals, counts)
            for part, counts in zip(rows, asked, strict=True)
        ]
        if len(asked[0]) == len(totals):
            break
        totals.append(sum(counts[len(totals)] for counts in asked))
    assume(totals)  # the method is one that sums over the batch
    whole = decide(case)
    for part, assignment in zip(rows, decided, strict=True):
        expected = Assignment(whole.index_TS[part], whole.keep_TS[part])
        assert kept_pairs(assignment) == kept_pairs(expected)


def _decide_part(
    case: Case, rows: slice, totals: list[torch.Tensor], asked: list[torch.Tensor]
) -> Assignment:
    """Return the decision on some tokens, for which the sums over all tokens are known in turn."""

    def total(count: torch.Tensor) -> torch.Tensor:
        asked.append(count)
        return totals[len(asked) - 1] if len(asked) <= len(totals) else count

    optional = (case.scores.choice_TE, case.scores.eligible_TE)
    scores = Scores(
        case.scores.score_TE[rows],
        case.scores.topk_TK[rows],
        *(None if tensor is None else tensor[rows] for tensor in optional),
    )
    whole = case.context()
    layer = LayerContext(
        limit_G=whole.limit_G,
        image_T=case.image_T[rows],
        hidden_TH=case.hidden_TH[rows],
        calibrated=whole.calibrated,
        total=total,
    )
    tensors = (case.groups.rows_T, case.groups.group_T, case.groups.rank_T)
    groups = TokenGroups(
        *(tensor[rows] for tensor in tensors), case.groups.tokens, case.groups.n_rows
    )
    return case.method.decide(scores, groups, layer)


def test_a_modality_goes_first_whatever_its_scores() -> None:
    scores = Scores(torch.tensor([[0.9], [0.8], [0.2], [0.1]]), torch.zeros(4, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool))
    image_T = torch.tensor([True, True, False, False])

    def kept(name: str, modality: str, gamma: float) -> list[int]:
        method = create_method(name, gamma, modality=modality)
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
    kept = assign(scores, TokenDrop(gamma=1.0), groups).keep_TS
    assert kept[:, 0].tolist() == [True, True, True, False, False, False]


def test_order_and_reverse_order_keep_opposite_ends() -> None:
    scores = Scores(torch.rand(5, 1), torch.zeros(5, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 5, dtype=torch.bool))
    first = assign(scores, OrderDrop(gamma=0.4), groups).keep_TS[:, 0]
    last = assign(scores, ReverseOrderDrop(gamma=0.4), groups).keep_TS[:, 0]
    assert first.tolist() == [True, True, False, False, False]
    assert last.tolist() == [False, False, False, True, True]


def test_random_depends_on_seed_layer_and_forward_alone() -> None:
    scores = Scores(torch.rand(200, 4), torch.zeros(200, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 200, dtype=torch.bool))

    def kept(seed: int, stream: tuple[int, int]) -> list[bool]:
        torch.rand(1)  # the global generator plays no part
        method = RandomDrop(gamma=1.0, seed=seed)
        layer, forward = stream
        knobs = {"layer": layer, "forward": forward}
        return assign(scores, method, groups, **knobs).keep_TS[:, 0].tolist()

    assert kept(0, (1, 2)) == kept(0, (1, 2))
    assert (
        len({tuple(kept(s, (layer, f))) for s in (0, 1) for layer in (0, 1) for f in (0, 1)}) == 8
    )


def test_random_keeps_every_token_equally_often() -> None:
    scores = Scores(torch.rand(40, 2), torch.zeros(40, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 40, dtype=torch.bool))
    times = torch.zeros(40)
    for forward in range(400):
        times += assign(scores, RandomDrop(gamma=1.0), groups, layer=0, forward=forward).keep_TS[
            :, 0
        ]
    # Each token is kept with probability 1/2: 200 of 400, standard deviation 10.
    assert float(times.min()) > 150 and float(times.max()) < 250


def test_expert_drop_silences_one_of_eight_and_breaks_ties_low() -> None:
    topk_TK = torch.tensor([[0], [1], [2], [3], [4], [5], [7], [7]])
    scores = Scores(torch.rand(8, 8), topk_TK)
    groups = group_tokens(torch.ones(1, 8, dtype=torch.bool))
    assert bool(assign(scores, ExpertDrop(), groups).keep_TS.all())  # expert 6 was idle
    busy = Scores(torch.rand(8, 8), torch.arange(8)[:, None])
    kept = assign(busy, ExpertDrop(), groups).keep_TS[:, 0]
    assert kept.tolist() == [False] + [True] * 7


def test_reroute_sends_overflow_to_the_next_best_expert() -> None:
    score_TE = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.8, 0.1, 0.1]])
    scores = Scores(score_TE, torch.zeros(3, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 3, dtype=torch.bool))
    one = assign(scores, TokenReroute(gamma=1.0, rounds=1), groups)
    assert kept_pairs(one) == [(2, 0)]
    two = assign(scores, TokenReroute(gamma=1.0, rounds=2), groups)
    assert kept_pairs(two) == [(0, 1), (2, 0)]
    three = assign(scores, TokenReroute(gamma=1.0, rounds=3), groups)
    assert kept_pairs(three) == [(0, 1), (1, 2), (2, 0)]
    most = assign(scores, TokenReroute(gamma=1.0, rounds=10**9), groups)  # it ends
    assert kept_pairs(most) == kept_pairs(three)


def test_local_candidates_are_those_of_the_rank_also_per_sequence() -> None:
    """With a group per sequence, group 3 of rank 1 still has the experts of rank 1."""
    score_TE = torch.full((4, 4), 0.25)
    scores = Scores(score_TE, torch.tensor([[2], [3], [0], [1]]))
    method = ExpandedDrop(gamma=100.0, ep_size=2, scope="sequence")
    groups = group_tokens(torch.ones(4, 1, dtype=torch.bool), ep_size=2, scope="sequence")
    assignment = assign(scores, method, groups)
    assert kept_pairs(assignment) == [
        *((0, 2), (0, 0), (0, 1), (1, 3), (1, 0), (1, 1)),
        *((2, 0), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)),
    ]


def test_global_candidates_are_expert_choice_routing() -> None:
    """All experts are candidates: each keeps its C best tokens, γ·K experts per token."""
    score_TE = torch.rand(12, 4).softmax(dim=1)
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    groups = group_tokens(torch.ones(3, 4, dtype=torch.bool))
    method = ExpandedDrop(gamma=1.0, candidates="global")
    assignment = assign(scores, method, groups)
    pairs = set(kept_pairs(assignment))
    best = score_TE.topk(6, dim=0).indices  # C = 12·2/4 = 6
    assert pairs == {(int(t), e) for e in range(4) for t in best[:, e]}


def test_uneven_experts_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^ep_size=8: 60 experts cannot be spread evenly"):
        TokenDrop(gamma=1.0, ep_size=8).check_layers(1, n_experts=60, top_k=4)
