"""One computation, one method: every combination of knobs against the definition."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from capmoe_eval.routing.groups import group_tokens
from capmoe_eval.routing.reference import assign_reference

from capmoe_eval.routing.method import DEFAULTS, Method
from capmoe_eval.routing.scores import Scores
from tests.routing.problems import Case, decide, kept_pairs

GROUPING = {
    "ep_size": (1, 2),
    "scope": ("batch", "sequence"),
    "granularity": ("expert", "device"),
    "rounding": ("ceil", "floor"),
    "modality": ("uniform", "image_first"),
}
KNOBS = {
    "order": GROUPING,
    "reverse_order": GROUPING,
    "random": GROUPING | {"seed": (0, 1)},
    "score": GROUPING,
    "expanded_drop": GROUPING
    | {
        "candidates": ("local", "ranked", "global"),
        "protect_topk": (False, True),
        "max_k": (False, True),
        "m": (2,),
    },
    "token_reroute": GROUPING | {"rounds": (1, 2)},
    "macs": {
        "ep_size": (1, 2),
        "scope": ("batch", "sequence"),
        "delta": (2.0,),
        "rho": (0.0, 1.5),
        "modality_threshold": (0.6, 0.95),
        "reroute": ("local", "none"),
    },
}
# Of methods without γ; a set of experts is that of the batch, whatever its capacity groups.
BOUNDS_ON_ACTIVATION = {
    "oea": {"k0": (1, 2), "scope": ("batch", "sequence")},
    "xshare": {
        "ep_size": (1, 2),
        "granularity": ("expert", "device"),
        "k0": (0, 1),
        "expert_budget": (0.3, 0.6, 1.0),
        "placement": ("contiguous", "eplb"),
    },
    "sere": {
        "k0": (1, 2),
        "min_similarity": (0.0, 0.7, 2.0),
        "scope": ("batch", "sequence"),
        "renormalize": ("before", "after"),
    },
}
# Experts of a rank that are no block.
_DEVICES = {"ep_size": (1, 2), "granularity": ("expert", "device"), "placement": ("eplb",)}
PLACED = {
    "score": _DEVICES | {"scope": ("batch", "sequence")},
    "expanded_drop": _DEVICES | {"candidates": ("local", "global"), "max_k": (False, True)},
    "token_reroute": _DEVICES | {"rounds": (1, 2)},
}
GAMMAS = (0.0, 0.6, 1.0, 1.3, 2.0, 2.3, math.inf)
STREAM = (1, 2)


def as_said(name: str, gamma: float, **knobs: object) -> Method:
    """The method as it was said, not brought to its canonical form."""
    method: Method = object.__new__(Method)
    for field in dataclasses.fields(Method):
        value = {"name": name, "gamma": gamma, **DEFAULTS, **knobs}[field.name]
        object.__setattr__(method, field.name, value)
    return method


def combinations(gammas: tuple[float, ...] = GAMMAS) -> Iterator[tuple[str, float, dict]]:
    for name, knobs in (*KNOBS.items(), *PLACED.items()):
        for gamma, values in itertools.product(gammas, itertools.product(*knobs.values())):
            yield name, gamma, dict(zip(knobs, values, strict=True))
    for name, knobs in BOUNDS_ON_ACTIVATION.items():
        for values in itertools.product(*knobs.values()):
            yield name, 1.0, dict(zip(knobs, values, strict=True))


def problem(number: int, n_experts: int, top_k: int, n_positions: int) -> tuple[Scores, object]:
    """Scores of four sequences with pads: ties, a family's bias and masked experts in turn."""
    generator = torch.Generator().manual_seed(number)
    counted_BS = torch.rand(4, n_positions, generator=generator) < 0.8
    counted_BS[:, 0] = True
    shape = (int(counted_BS.sum()), n_experts)
    levels = 3 if number % 2 else 1000
    logits_TE = torch.randint(levels, shape, generator=generator) / levels * 3
    score_TE = (logits_TE + torch.arange(n_experts) * 0.4).softmax(dim=1)
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


PROBLEMS = [problem(number, 4 + 2 * (number % 2), 1 + number % 3, 3) for number in range(6)]
# Large enough for two methods that differ to differ somewhere.
LARGE = [problem(number, 12, 1 + number % 3, 24) for number in range(6, 12)]
LARGE.append(problem(14, 12, 6, 1))  # few tokens, with experts that are nobody's second best


def case(method: Method, at: tuple[Scores, object]) -> Case:
    scores, counted_BS = at
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    # Little text where K is large: its added pairs do not fill all buckets.
    image_T = torch.arange(groups.n_tokens) % (3 + 9 * (scores.topk_TK.shape[1] - 1)) > 0
    return Case(scores, groups, counted_BS, method, image_T, seed=len(counted_BS[0]))


def decided(method: Method, at: tuple[Scores, object]) -> frozenset[tuple[int, int]]:
    here = case(method, at)
    assignment = decide(here, STREAM)
    return frozenset(kept_pairs(assignment.index_TS, assignment.keep_TS))


@pytest.mark.parametrize("name", KNOBS | BOUNDS_ON_ACTIVATION)
def test_the_canonical_form_decides_as_the_knobs_that_were_said(name: str) -> None:
    """The definition on the knobs as said, the tensors on the canonical form."""
    draws = random.Random(name)
    known: dict[tuple[Method, int], frozenset[tuple[int, int]]] = {}
    for _, gamma, knobs in (c for c in combinations() if c[0] == name):
        method = Method(name, gamma, **knobs)
        said = as_said(name, gamma, **knobs)
        for number, at in draws.sample(list(enumerate(PROBLEMS)), 3):
            if (method, number) not in known:
                known[method, number] = decided(method, at)
            wanted = assign_reference(case(said, at).problem(STREAM), said)
            assert known[method, number] == wanted, (name, gamma, knobs, method)


def test_methods_that_differ_decide_differently_somewhere() -> None:
    """Whatever decides alike everywhere should have been one method."""
    # From γ=2 on, what max_k cuts from a device's load is seldom seen on so few tokens.
    gammas = tuple(gamma for gamma in GAMMAS if gamma < 2 or gamma == math.inf)
    methods = {Method(name, gamma, **knobs) for name, gamma, knobs in combinations(gammas)}
    # At γ=0 the ranks stay, for what a record counts of them.
    methods = {m for m in methods if m.gamma != 0 or m.ep_size == 1}
    alike = [list(methods)]
    for at in (*LARGE, *PROBLEMS):  # of those that decided alike on all before
        parts: dict[tuple[int, frozenset[tuple[int, int]]], list[Method]] = defaultdict(list)
        for number, several in enumerate(alike):
            for method in several:
                parts[number, decided(method, at)].append(method)
        alike = [several for several in parts.values() if len(several) > 1]
    assert not [[m.identity() for m in several] for several in alike]


def test_a_canonical_form_is_its_own() -> None:
    for name, gamma, knobs in combinations():
        method = Method(name, gamma, **knobs)
        assert dataclasses.replace(method) == method
        identity = method.identity()
        gamma_knob = identity.pop("gamma", None)
        again = Method(
            identity.pop("method"), None if gamma_knob is None else float(gamma_knob), **identity
        )
        assert again == method
        assert again.identity() == method.identity()


ALIKE = [
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
    (("score", -0.0, {}), ("score", 0.0, {})),
    (("score", math.inf, {"modality": "image_first"}), ("baseline", None, {})),
    (("random", 0.0, {"modality": "text_first"}), ("score", 0.0, {})),
    (("expert_drop", 1.0, {"modality": "text_first"}), ("expert_drop", None, {})),
    (
        ("expanded_drop", math.inf, {"modality": "text_first", "max_k": True}),
        ("expanded_drop", math.inf, {"max_k": True}),
    ),
    (("xshare", 1.0, {"expert_budget": 1}), ("baseline", None, {})),
    (("oea", 1.0, {"ep_size": 8, "expert_budget": 0.1}), ("oea", None, {"scope": "sequence"})),
    (("sere", 1.0, {"min_similarity": 1.01, "k0": 2}), ("baseline", None, {})),
    (("sere", 1.0, {"ep_size": 8, "renormalize": "after"}), ("sere", None, {})),
    (("xshare", 1.0, {"ep_size": 8}), ("xshare", None, {"granularity": "device"})),
    (("macs", math.inf, {"delta": 2, "ep_size": 8}), ("baseline", None, {})),
    (("macs", 0.0, {"rho": 2}), ("score", 0.0, {})),
    (("macs", 1.0, {"rho": 0, "modality_threshold": 0.9}), ("macs", 1.0, {"rho": 0.0})),
    (("macs", 1.0, {"modality": "image_first"}), ("macs", 1.0, {"granularity": "device"})),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_one_computation_is_one_method(
    one: tuple[str, float, dict], other: tuple[str, float | None, dict]
) -> None:
    first, second = (Method(name, gamma, **knobs) for name, gamma, knobs in (one, other))
    assert first == second
    assert str(first.identity()) == str(second.identity())  # -0.0 equals 0.0 and reads otherwise


DIFFERENT = [
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
    # Neither E nor K is known here.
    (("oea", 1.0, {"k0": 99}), ("baseline", None, {})),
    (("sere", 1.0, {"k0": 99}), ("baseline", None, {})),
    (("sere", 1.0, {"min_similarity": 1}), ("baseline", None, {})),
    (("xshare", 1.0, {"k0": 0}), ("xshare", None, {})),
    # Tokens of images weigh a half.
    (("macs", 1.0, {"delta": 0, "rho": 0, "reroute": "none"}), ("score", 1.0, {})),
    # Rerouting is to experts of the same rank, whatever the group.
    (
        ("macs", 1.0, {"ep_size": 2, "scope": "sequence"}),
        ("macs", 1.0, {"ep_size": 4, "scope": "sequence"}),
    ),
    # m ≥ E-K adds all experts, but E and K are the model's.
    (
        ("expanded_drop", 1.0, {"candidates": "ranked", "m": 999}),
        ("expanded_drop", 1.0, {"candidates": "global"}),
    ),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_computations_or_records_stay_apart(
    one: tuple[str, float, dict], other: tuple[str, float | None, dict]
) -> None:
    first, second = (Method(name, gamma, **knobs) for name, gamma, knobs in (one, other))
    assert first != second
