"""One computation, one method: combinations of the knobs of every method against the definition."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.routing.problems import (
    Case,
    as_said,
    combinations,
    decide,
    deciding_knobs,
    kept_pairs,
)
from tests.routing.reference import assign_reference

GAMMAS = (0.0, 0.6, 1.0, 1.3, 2.0, 2.3, math.inf)
STREAM = (1, 2)
# Combinations that are tried: all, but of Expanded Drop and MACS; and changes of a knob.
MOST, CHANGES = 4000, 300

Pairs = frozenset[tuple[int, int]]
Inputs = tuple[Scores, torch.Tensor]  # scores, and the mask of the tokens that count


def inputs(number: int, n_experts: int, top_k: int, n_positions: int) -> Inputs:
    """Return scores of four sequences with pads: ties, a family's bias and masked experts."""
    generator = torch.Generator().manual_seed(number)
    counted_BS = torch.rand(4, n_positions, generator=generator) < 0.8
    counted_BS[:, 0] = True
    shape = (int(counted_BS.sum()), n_experts)
    levels = 1 if number % 10 == 4 else 3 if number % 2 else 1000
    logits_TE = torch.randint(levels, shape, generator=generator) / levels * 3
    popularity = 0.0 if number % 5 == 4 else 0.4  # without it, more than K scores are the best
    score_TE = (logits_TE + torch.arange(n_experts) * popularity).softmax(dim=1)
    choice_TE = eligible_TE = None
    if number % 3 == 1:
        choice_TE = score_TE + torch.randint(3, (n_experts,), generator=generator) / 4
    if number % 4 == 2:
        eligible_TE = torch.rand(shape, generator=generator) < 0.7
        score_TE = score_TE.masked_fill(~eligible_TE, 0.0)
    ranking_TE = (score_TE if choice_TE is None else choice_TE) + torch.rand(
        shape, generator=generator
    ) * 1e-4
    if eligible_TE is not None:
        ranking_TE = ranking_TE + eligible_TE * 10.0
    topk_TK = ranking_TE.topk(top_k, dim=1).indices
    return Scores(score_TE, topk_TK, choice_TE, eligible_TE), counted_BS


# K is 2 or 3: the knobs `k0` are at most 2.
SMALL = [inputs(number, 4 + 2 * (number % 2), 2 + number % 2, 3) for number in range(6)]


def of_method(method: Method, at: Inputs) -> Case:
    scores, counted_BS = at
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    # Little text where K is large: its added pairs do not fill all buckets.
    image_T = torch.arange(groups.n_tokens) % (3 + 9 * (scores.topk_TK.shape[1] - 1)) > 0
    return Case(scores, groups, counted_BS, method, image_T, seed=int(scores.topk_TK.sum()))


def decided(method: Method, at: Inputs) -> Pairs:
    return frozenset(kept_pairs(decide(of_method(method, at), STREAM)))


def said(name: str, gammas: tuple[float, ...] = GAMMAS) -> Iterator[Method]:
    """Return methods with combinations of knobs, not in their canonical form."""
    for settings in combinations(name, gammas, MOST):
        method = as_said(name, settings, n_experts=4, top_k=2)
        if method is not None:
            yield method


@pytest.mark.parametrize("name", method_names())
def test_the_canonical_form_decides_as_the_knobs_that_were_said(name: str) -> None:
    """As the definition of the method that was said, and so does that method itself."""
    draws = random.Random(name)
    known: dict[tuple[Method, int], Pairs] = {}
    methods = list(said(name))
    assert methods and len(methods) >= len(deciding_knobs(name))
    for method in methods:
        canonical = method.canonical()
        number = draws.randrange(len(SMALL))
        at = SMALL[number]
        if at[0].score_TE.shape[1] % method.ep_size:
            number, at = 0, SMALL[0]
        if (canonical, number) not in known:
            known[canonical, number] = decided(canonical, at)
        expected = assign_reference(of_method(method, at).problem(STREAM), method)
        assert known[canonical, number] == expected, (method, canonical)
        if not canonical.is_stock:  # then the method may leave its decision open
            assert decided(method, at) == expected, method


@pytest.mark.parametrize("name", method_names())
def test_a_knob_that_stays_has_an_effect(name: str) -> None:
    """Of two methods that differ in one knob, some batch tells the canonical forms apart."""
    draws = random.Random(name)
    # From γ=2 on, what max_k cuts from a device's load is seldom seen on so few tokens.
    gammas = tuple(gamma for gamma in GAMMAS if gamma < 2 or gamma == math.inf)
    knobs, told_apart = deciding_knobs(name), 0
    for first in combinations(name, gammas, CHANGES):
        if not knobs:
            break
        knob = draws.choice(list(knobs))
        seconds = [first | {knob: value} for value in knobs[knob]]
        methods = [as_said(name, each, n_experts=12, top_k=2) for each in (first, *seconds)]
        one, *others = (None if method is None else method.canonical() for method in methods)
        # At γ=0 the ranks stay, for what a record counts of them.
        if one is None or (one.factor is not None and one.factor.uniform == 0):
            continue
        for other in {other for other in others if other not in (one, None)}:
            told_apart += 1
            differs = any(decided(one, at) != decided(other, at) for at in batches())
            assert differs, f"{one.identity()} and {other.identity()} decide alike"
    assert told_apart or not knobs


def batches() -> Iterator[Inputs]:
    for number in range(6, 80):
        yield inputs(number, 12, (2, 3, 6)[number % 3], (24, 6, 1, 12)[number % 4])


@pytest.mark.parametrize("name", method_names())
def test_an_identity_gives_back_the_canonical_form(name: str) -> None:
    for method in said(name):
        canonical = method.canonical()
        assert canonical.canonical() == canonical
        identity = canonical.identity()
        again = from_identity(identity)
        assert again == canonical and again.label == canonical.label
        assert str(again.identity()) == str(identity)


def from_identity(identity: dict[str, Any]) -> Method:
    knobs = dict(identity)
    return create_method(knobs.pop("method"), knobs.pop("gamma", None), **knobs)


Settings = tuple[str, float | None, dict[str, Any]]
ALIKE: list[tuple[Settings, Settings]] = [
    (("token_reroute", 1.0, {"rounds": 1, "ep_size": 4}), ("score", 1.0, {"ep_size": 4})),
    (
        ("expanded_drop", 1.0, {"candidates": "local"}),
        ("expanded_drop", 1.0, {"candidates": "global"}),
    ),
    (("random", math.inf, {"seed": 3, "ep_size": 8}), ("baseline", None, {})),
    (("token_reroute", math.inf, {"rounds": 1, "count_padding": True}), ("baseline", None, {})),
    (
        ("expanded_drop", math.inf, {"protect_topk": True, "max_k": True, "ep_size": 8}),
        ("baseline", None, {}),
    ),
    (
        ("expanded_drop", math.inf, {"candidates": "global", "rounding": "floor", "ep_size": 8}),
        ("expanded_drop", math.inf, {"candidates": "global", "scope": "sequence"}),
    ),
    (("order", 0.0, {"ep_size": 8}), ("score", 0.0, {"ep_size": 8})),
    (
        ("expanded_drop", 0.0, {"ep_size": 8, "candidates": "ranked", "m": 3}),
        ("random", 0.0, {"ep_size": 8, "seed": 2, "rounding": "floor", "renormalize": "after"}),
    ),
    (("device_drop", 8.0, {"ep_size": 8}), ("baseline", None, {})),
    (
        (
            "expanded_drop",
            0.6,
            {"granularity": "device", "protect_topk": True, "candidates": "ranked"},
        ),
        ("score", 0.6, {"granularity": "device"}),
    ),
    (  # γ·T·K/R is a whole number
        ("expanded_drop", 1.0, {"granularity": "device", "rounding": "floor"}),
        ("expanded_drop", 1.0, {"granularity": "device"}),
    ),
    (("score", -0.0, {}), ("score", 0.0, {})),
    (("score", math.inf, {"modality": "image_first"}), ("baseline", None, {})),
    (("random", 0.0, {"modality": "text_first"}), ("score", 0.0, {})),
    (("expert_drop", 1.0, {"modality": "text_first"}), ("expert_drop", None, {})),
    (
        ("expanded_drop", math.inf, {"modality": "text_first", "max_k": True}),
        ("expanded_drop", math.inf, {"max_k": True}),
    ),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_one_computation_is_one_method(one: Settings, other: Settings) -> None:
    are_alike(one, other)


def are_alike(one: Settings, other: Settings) -> None:
    first, second = (create_method(name, gamma, **knobs) for name, gamma, knobs in (one, other))
    assert first == second
    assert str(first.identity()) == str(second.identity())  # -0.0 equals 0.0 and reads otherwise


DIFFERENT: list[tuple[Settings, Settings]] = [
    # The added candidates' order is the family's bias, the cut is by score: a bias parts them.
    (("expanded_drop", math.inf, {"max_k": True}), ("baseline", None, {})),
    (("expanded_drop", math.inf, {"ep_size": 4}), ("expanded_drop", math.inf, {"ep_size": 8})),
    # What a record counts: the loads of devices, and the tokens.
    (("score", 0.0, {"ep_size": 4}), ("score", 0.0, {"ep_size": 8})),
    (("score", 0.0, {"count_padding": True}), ("score", 0.0, {})),
    (("score", 0.0, {"decode": "constrained"}), ("score", 0.0, {})),
    (("device_drop", 7.9, {"ep_size": 8}), ("baseline", None, {})),
    (("token_reroute", 1.0, {"rounds": 2}), ("score", 1.0, {})),
    (("score", 1.0, {"modality": "image_first"}), ("score", 1.0, {})),
    # An added pair of text goes before an image's own.
    (
        (
            "expanded_drop",
            0.6,
            {"granularity": "device", "protect_topk": True, "modality": "image_first"},
        ),
        ("score", 0.6, {"granularity": "device", "modality": "image_first"}),
    ),
    # m ≥ E-K adds all experts, but E and K are the model's.
    (
        ("expanded_drop", 1.0, {"candidates": "ranked", "m": 999}),
        ("expanded_drop", 1.0, {"candidates": "global"}),
    ),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_computations_or_records_stay_apart(one: Settings, other: Settings) -> None:
    are_different(one, other)


def are_different(one: Settings, other: Settings) -> None:
    first, second = (create_method(name, gamma, **knobs) for name, gamma, knobs in (one, other))
    assert first != second
