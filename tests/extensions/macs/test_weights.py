"""MACS: the weights of tokens, the capacities of experts, and what becomes of the overflow."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capmoe_eval.extensions.macs import MACS
from capmoe_eval.extensions.macs.decision import (
    UNIT,
    Weighted,
    assign_weighted,
    modality_bias,
    token_weights,
    weigh,
    weighted_limits,
)
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.scores import Scores, bucket_loads
from capmoe_eval.routing.tokens import group_tokens
from tests.extensions.macs import reference
from tests.routing.problems import Case, cases, context, decide, kept_pairs

GAMMAS = [0.1, 0.5, 0.75, 1.0, 1.5, 3.0]


def weighted_of(case: Case) -> Weighted:
    """Return the weights and capacities of a case."""
    bias_E = case.calibrated
    if bias_E is None:
        bias_E = torch.zeros(case.n_experts, dtype=torch.long)
    parts = {"hidden_TH": case.hidden_TH, "image_T": case.image_T}
    assert isinstance(case.method, MACS)
    return weigh(case.method, case.groups, bias_E=bias_E, top_k=case.top_k, **parts)


def changed(case: Case, **knobs: Any) -> Case:
    """Return a case with other knobs."""
    return case.of(dataclasses.replace(case.method, **knobs))  # type: ignore[type-var]


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_weights_are_those_of_the_definition(case: Case) -> None:
    method = case.method
    assert isinstance(method, MACS)
    units = weighted_of(case).unit_T.tolist()
    image, group = case.image_T.tolist(), case.groups.group_T.tolist()
    expected = reference.weights(case.hidden_TH.tolist(), image, group, method.delta)
    for unit, weight in zip(units, expected, strict=True):
        assert abs(unit - UNIT * weight) <= 2 + 1e-4 * UNIT * (1 + method.delta)
    assert all(unit == UNIT for unit, of_image in zip(units, image, strict=True) if not of_image)
    if method.delta == 0:
        assert {u for u, of_image in zip(units, image, strict=True) if of_image} <= {UNIT // 2}


def test_a_flat_hidden_state_weighs_less_and_a_lone_token_a_half() -> None:
    hidden_TH = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    image_T = torch.tensor([True, True, True, False])
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool))
    flat, some, peaked, text = token_weights(hidden_TH, image_T, groups, 1.0).tolist()
    assert 0 < flat < some < UNIT / 2 < peaked < UNIT == text
    flatter, _, sharper, _ = token_weights(hidden_TH, image_T, groups, 3.0).tolist()
    assert flatter < flat and sharper > peaked
    alone = torch.tensor([True, False, False, False])
    assert int(token_weights(hidden_TH, alone, groups, 5.0)[0]) == UNIT // 2


def test_every_token_weighs_at_least_a_unit() -> None:
    """Four flat tokens and one that is not: at δ=100 the weight of the flat ones is below 2⁻²⁴."""
    hidden_TH = torch.zeros(5, 3)
    hidden_TH[0, 0] = 50.0
    groups = group_tokens(torch.ones(1, 5, dtype=torch.bool))
    peaked, *flat = token_weights(hidden_TH, torch.ones(5) > 0, groups, 100.0).tolist()
    assert flat == [1] * 4 and peaked == UNIT


def test_a_group_without_a_token_has_no_weight_of_images() -> None:
    """The second rank's sequence is padding alone, and the third's has no image."""
    counted_BS = torch.tensor([[True, True], [False, False], [True, True]])
    groups = group_tokens(counted_BS, ep_size=3)
    image_T = torch.tensor([True, False, False, False])
    bias_E = torch.tensor([1, 0, -1])
    hidden_TH = torch.arange(8.0).view(4, 2)
    method = MACS(gamma=1.0, ep_size=3)
    weighted = weigh(method, groups, bias_E=bias_E, top_k=1, hidden_TH=hidden_TH, image_T=image_T)
    assert weighted.visual_ratio_G.tolist() == [pytest.approx(1 / 3), 0.0, 0.0]
    assert weighted.limit_GE[1].tolist() == [0, 0, 0]


def test_weights_do_not_lose_the_precision_of_float32_in_a_model_of_bfloat16() -> None:
    hidden_TH = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    groups = group_tokens(torch.ones(1, 40, dtype=torch.bool))
    image_T = torch.ones(40) > 0
    low, high = (token_weights(h, image_T, groups, 2.0) for h in (hidden_TH, hidden_TH.float()))
    assert torch.equal(low, high)


def test_an_expert_is_of_the_modality_that_activates_it_most() -> None:
    visual_E, text_E = torch.tensor([[0.6, 0.5, 0.4, 0.0, 0.1], [0.4, 0.5, 0.6, 0.0, 0.0]])
    assert modality_bias(visual_E, text_E, 0.6).tolist() == [1, 0, -1, 0, 1]
    assert modality_bias(visual_E, text_E, 0.7).tolist() == [0, 0, 0, 0, 1]
    assert modality_bias(visual_E, text_E, 1.0).tolist() == [0, 0, 0, 0, 1]


def test_capacities_follow_the_modalities() -> None:
    """Four tokens, K = 1 and two experts: C = 2 at γ=1. A visual, a text and a shared expert."""
    groups = group_tokens(torch.ones(2, 2, dtype=torch.bool))
    bias_E = torch.tensor([1, -1, 0])

    def limits(ratio: float, rho: float) -> list[float]:
        method = MACS(gamma=1.5, rho=rho)  # C = 1.5·4·1/3 = 2
        found = weighted_limits(method, groups, torch.tensor([ratio]).double(), bias_E, 1)
        return (found[0] / UNIT).tolist()

    assert limits(1.0, 1.0) == [3.0, 1.0, 2.0]
    assert limits(0.5, 1.0) == [2.0, 2.0, 2.0]
    assert limits(0.0, 1.0) == [1.0, 3.0, 2.0]  # a batch of text alone
    assert limits(0.0, 2.0) == [0.0, 4.0, 2.0]
    assert limits(1.0, 0.0) == [2.0, 2.0, 2.0]


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_equal_weights_without_modalities_and_rerouting_are_token_drop(case: Case) -> None:
    """Bit for bit, in the slots as in the pairs."""
    case = changed(case, rho=0.0, reroute="none", ep_size=1)
    text = dataclasses.replace(case, image_T=torch.zeros_like(case.image_T))
    macs, drop = decide(text), decide(case.of(case.method.converted(TokenDrop)))
    assert torch.equal(macs.index_TS, drop.index_TS)
    assert torch.equal(macs.keep_TS, drop.keep_TS)


@settings(max_examples=60, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_no_expert_keeps_more_weight_than_its_capacity(case: Case) -> None:
    """Nor does it drop a pair for which there was room: the next one would have been too much."""
    weighted = weighted_of(case)
    pairs = {}
    for reroute in ("local", "none"):
        assignment = decide(changed(case, reroute=reroute))
        pairs[reroute] = set(kept_pairs(assignment))
        kept_TS = weighted.unit_T[:, None] * assignment.keep_TS
        load_GE = bucket_loads(
            case.groups.group_T, assignment.index_TS, kept_TS, weighted.limit_GE.shape
        )
        assert bool((load_GE <= weighted.limit_GE).all())
    group, local = case.groups.group_T.tolist(), case.n_experts // case.method.ep_size
    kept, moved = pairs["none"], pairs["local"]
    own = {(t, e) for t, row in enumerate(case.scores.topk_TK.tolist()) for e in row}
    for token, expert in own - kept:
        room = weighted.limit_GE[group[token], expert] - load_GE[group[token], expert]
        waiting = [
            (-float(case.scores.score_TE[t, expert]), t)
            for t, e in own - kept
            if e == expert and group[t] == group[token]
        ]
        assert int(weighted.unit_T[min(waiting)[1]]) > int(room)
    # What is rerouted takes the place of a pair that the token lost on the same rank.
    assert kept <= moved
    for token in {t for t, _ in moved - kept}:
        for rank in range(case.method.ep_size):
            added, lost = (
                sum(t == token and e // local == rank for t, e in each)
                for each in (moved - kept, own - kept)
            )
            assert added <= lost


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS), st.randoms(use_true_random=False))
def test_the_order_of_tokens_plays_no_part_without_ties(case: Case, random: object) -> None:
    scores = case.scores
    assume(all(len(set(column)) == len(column) for column in scores.score_TE.T.tolist()))
    case = changed(case, scope="batch", ep_size=1)
    order = list(range(len(case.image_T)))
    random.shuffle(order)  # type: ignore[attr-defined]
    groups = group_tokens(torch.ones(1, len(order), dtype=torch.bool))

    def kept(rows: list[int]) -> set[tuple[int, int]]:
        optional = (scores.choice_TE, scores.eligible_TE)
        mixed = Scores(
            scores.score_TE[rows],
            scores.topk_TK[rows],
            *(None if part is None else part[rows] for part in optional),
        )
        parts = {"hidden_TH": case.hidden_TH[rows], "image_T": case.image_T[rows]}
        layer = context(case.method, mixed, groups, calibrated=case.calibrated, **parts)
        return {(rows[t], e) for t, e in kept_pairs(case.method.decide(mixed, groups, layer))}

    assert kept(order) == kept(sorted(order))


def test_light_tokens_fit_where_heavy_ones_do_not() -> None:
    """Three tokens of one expert, C = 2 of weight: two of text fit, and with a light one, three.

    The fourth, of text, overflows; its next expert on the same rank takes it.
    """
    score_TE = torch.tensor(
        [[0.9, 0.06, 0.04], [0.8, 0.06, 0.14], [0.7, 0.2, 0.1], [0.6, 0.1, 0.3]]
    )
    scores = Scores(score_TE, torch.zeros(4, 1, dtype=torch.long))
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool))

    def kept(units: list[int], reroute: str, ep_size: int = 1) -> list[tuple[int, int]]:
        method = MACS(gamma=1.5, reroute=reroute, ep_size=ep_size)
        limit_GE = torch.tensor([[2 * UNIT, 1 * UNIT, 1 * UNIT]])
        weighted = Weighted(torch.tensor(units), limit_GE, torch.zeros(1))
        return sorted(kept_pairs(assign_weighted(scores, method, groups, weighted)))

    text, light = [UNIT] * 4, [UNIT, UNIT // 4, UNIT // 2, UNIT]
    assert kept(text, "none") == [(0, 0), (1, 0)]
    assert kept(light, "none") == [(0, 0), (1, 0), (2, 0)]
    assert kept(text, "local") == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert kept(light, "local") == [(0, 0), (1, 0), (2, 0), (3, 2)]
    assert kept(text, "local", ep_size=3) == kept(text, "none")  # no other expert on the rank
    # Where two arrive and one fits, the better-scoring stays.
    score_TE[3] = torch.tensor([0.6, 0.3, 0.1])
    assert kept(text, "local") == [(0, 0), (1, 0), (3, 1)]
