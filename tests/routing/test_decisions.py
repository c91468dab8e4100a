"""Every decision against its definition as loops and in NumPy; it compiles into one graph."""

import dataclasses
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capmoe_eval.routing import definition
from capmoe_eval.routing.capacity import capacity
from capmoe_eval.routing.decision import Scores, group_tokens
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.methods.token_drop import RandomDrop, TokenDrop
from capmoe_eval.routing.methods.token_reroute import TokenReroute
from capmoe_eval.routing.registry import create_method, method_names
from tests.routing.problems import (
    GAMMAS,
    Case,
    assign,
    cases,
    decide,
    draw_scores,
    kept_pairs,
    one_group,
)
from tests.routing.reference import assign_reference

METHODS = method_names()
STREAMS = st.tuples(st.integers(0, 3), st.integers(0, 3))
FIRST = ("image_first", "text_first")


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), stream=STREAMS)
def test_decision_loops_and_definition_agree(
    name: str, data: st.DataObject, stream: tuple[int, int]
) -> None:
    """The decision's tensors, the loops of ``reference.py``, and the NumPy of the invariants."""
    case = data.draw(cases((name,)))
    assignment = decide(case, stream)
    pairs = kept_pairs(assignment)
    assert len(pairs) == len(set(pairs)), "a pair is kept twice"
    assert torch.equal(assignment.index_TS[:, : case.top_k], case.scores.topk_TK)
    tokens = case.tokens(stream)
    assert assign_reference(tokens, case.method) in (None, set(pairs))
    kept_TE = case.method.kept_pairs(tokens)
    assert kept_TE is not None, "every method of ours has a definition"
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(kept_TE)), strict=True)) == set(pairs)
    assert definition.buckets_beyond(tokens, kept_TE) == 0
    assert case.method.details_off(tokens) == 0


@pytest.mark.parametrize("name", [name for name in METHODS if name != "baseline"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_bound_that_never_binds_keeps_everything(name: str, data: st.DataObject) -> None:
    """The method decides, unlike at γ=∞, which is the baseline."""
    case = data.draw(cases((name,), gammas=(0.5, 1.0)))
    assume(not case.method.is_stock)
    method = case.method.never_binding(case.n_experts, case.top_k)
    assert not method.is_stock
    assert set(kept_pairs(decide(case.of(method)))) == case.chosen


@settings(max_examples=150, deadline=None)
@given(data=st.data(), modality=st.sampled_from(FIRST))
def test_a_priority_subtracts_one_from_scores_below_one(data: st.DataObject, modality: str) -> None:
    """As the released code has it: the ranking by score - 1, the weights by the score."""
    case = data.draw(cases(("score", "expanded_drop", "token_reroute")))
    assume(not case.method.is_stock and float(case.scores.score_TE.max()) < 1)
    # The released code protects no top-k. Token Reroute goes on with the scores themselves.
    knobs = {"protect_topk": False} if isinstance(case.method, ExpandedDrop) else {}
    case = case.with_knobs(modality=modality, **knobs)
    uniform = case.with_knobs(modality="uniform")
    plain = uniform.tokens()
    lowered_T = plain.image_T == (modality == "image_first")
    score_TE = plain.score_TE.astype(np.float64) - lowered_T[:, None]
    kept = assign_reference(dataclasses.replace(plain, score_TE=score_TE), uniform.method)
    assert set(kept_pairs(decide(case))) == kept


def kept_at_random(method: RandomDrop, n_tokens: int, **stream: int) -> list[bool]:
    """Return which of the tokens of one expert are kept."""
    torch.rand(1)  # the global generator plays no part
    scores = Scores(torch.rand(n_tokens, 2), torch.zeros(n_tokens, 1, dtype=torch.long))
    return assign(scores, method, one_group(n_tokens), **stream).keep_TS[:, 0].tolist()


def test_random_depends_on_seed_layer_and_forward_alone() -> None:
    drawn = [
        tuple(kept_at_random(RandomDrop(gamma=1.0, seed=seed), 200, layer=layer, forward=forward))
        for seed, layer, forward in ((s, x, f) for s in (0, 1) for x in (0, 1) for f in (0, 1, 1))
    ]
    assert len(set(drawn)) == 8
    assert drawn[1::3] == drawn[2::3]


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
    logits_TE = torch.rand(12, 4 * ranks, generator=torch.Generator().manual_seed(seed))
    logits_TE[:, :4] += skew  # the first device is popular
    score_TE = logits_TE.softmax(dim=1)
    scores = Scores(score_TE, score_TE.topk(top_k, dim=1).indices)
    method = TokenReroute(gamma=gamma, ep_size=ranks, granularity="device", rounds=10**9)
    groups = one_group(12, ranks)
    pairs = kept_pairs(assign(scores, method, groups))
    assert set(Counter(token for token, _ in pairs).values()) == {top_k}
    limits = method.limits(groups.tokens, top_k=top_k, n_experts=4 * ranks)
    group = groups.group_T.tolist()
    load = Counter((group[token], expert // 4) for token, expert in pairs)
    assert all(count <= limits[g] for (g, _), count in load.items())
    for token, row in enumerate(score_TE.tolist()):
        experts = {expert for t, expert in pairs if t == token}
        worst = min(row[expert] for expert in experts)
        better = {expert for expert in range(4 * ranks) if row[expert] > worst} - experts
        # A better one is passed over where its device is full.
        assert all(load[group[token], expert // 4] == limits[group[token]] for expert in better)


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


# Compiled.


COMPILED = {"ep_size": 2, "modality": "image_first", "max_k": True, "load_updates": 3}


@pytest.mark.parametrize(
    ("name", "backend", "knobs"),
    [
        *((name, "aot_eager", {}) for name in METHODS),
        # Knobs that lead elsewhere.
        ("score", "aot_eager", {"granularity": "device"}),
        ("order", "aot_eager", {"scope": "sequence"}),
        ("expanded_drop", "aot_eager", {"candidates": "ranked"}),
        ("expanded_drop", "aot_eager", {"candidates": "global", "protect_topk": True}),
        pytest.param("expanded_drop", "inductor", {}, marks=pytest.mark.nightly),
    ],
)
def test_a_decision_is_one_graph(name: str, backend: str, knobs: dict[str, Any]) -> None:
    """On two ranks, with pads, masked experts and images."""
    method = create_method(name, 1.0, **COMPILED, **knobs)
    generator = torch.Generator().manual_seed(0)
    counted_BS = torch.ones(4, 6, dtype=torch.bool)
    counted_BS[2, 4:] = False
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    scores = draw_scores(
        generator, (groups.n_tokens, 8), 2, levels=1000, is_biased=False, is_masked=True
    )
    image_T = torch.rand(groups.n_tokens, generator=generator) < 0.5
    arguments = scores, groups, Case(scores, groups, counted_BS, method, image_T).context()
    torch.compiler.reset()
    compiled = torch.compile(method.decide, fullgraph=True, dynamic=False, backend=backend)
    graph, eager = compiled(*arguments), method.decide(*arguments)
    for part in ("index_TS", "keep_TS", "slot_TK"):
        expected = getattr(eager, part)
        assert expected is getattr(graph, part) or torch.equal(getattr(graph, part), expected)
