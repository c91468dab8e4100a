"""LASER's decision on tensors, its definition in NumPy, and loops over lists: they agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.extensions.laser import Laser
from capmoe_eval.extensions.laser.assign import _parts
from capmoe_eval.routing.context import LayerContext
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import TokenGroups, group_tokens
from tests.extensions.laser.loops import Token, assigned

# Four tokens, K = 1: one with peaked scores and three with flat ones, which all prefer expert 0.
SCORES = torch.tensor([[0.9, 0.05, 0.03, 0.02]] + [[0.31, 0.28, 0.27, 0.14]] * 3)


def half(**knobs: Any) -> Laser:
    """Return LASER with both shares at a half, but for the knobs."""
    return Laser(**{"peak_mass": 0.5, "viable_score": 0.5} | knobs)


def decide(method: Laser, scores: Scores, groups: TokenGroups) -> Assignment:
    return method.decide(scores, groups, LayerContext())


def experts(method: Laser, score_TE: Tensor = SCORES, top_k: int = 1) -> list[list[int]]:
    """Return the experts of every token of one group, rising."""
    scores = Scores(score_TE, score_TE.topk(top_k, dim=1).indices)
    groups = group_tokens(torch.ones(1, len(score_TE), dtype=torch.bool))
    found = decide(method, scores, groups)
    rows = zip(found.index_TS, found.keep_TS, strict=True)
    return [sorted(index_S[keep_S].tolist()) for index_S, keep_S in rows]


def test_a_peaked_token_stays_and_flat_ones_go_to_the_least_loaded_viable_expert() -> None:
    """Expert 3 is not viable; when all others have one token, the third prefers its best again."""
    assert experts(half()) == [[0], [1], [2], [0]]
    assert experts(half(viable_score=0.9)) == [[0], [1], [0], [1]]
    assert experts(half(peak_mass=0.3)) == [[0]] * 4  # 0.3 of the scores are enough
    assert experts(half(viable_score=0.0)) == [[0], [1], [2], [3]]
    assert experts(half(peak_mass=1.0, viable_score=0.0)) == [[0], [1], [2], [3]]


def test_tokens_of_a_part_see_the_loads_before_it() -> None:
    assert experts(half(load_updates=1)) == [[0]] * 4  # no load yet
    assert experts(half(load_updates=2)) == [[0], [0], [1], [1]]


def test_every_rank_balances_its_own_tokens() -> None:
    flat = Scores(SCORES[1:].repeat(2, 1)[:4], torch.zeros(4, 1, dtype=torch.long))
    pairs = []
    for ep_size in (1, 2):
        groups = group_tokens(torch.ones(4, 1, dtype=torch.bool), ep_size=ep_size)
        found = decide(half(ep_size=ep_size), flat, groups)
        pairs.append(found.index_TS[found.keep_TS].tolist())
    assert pairs == [[0, 1, 2, 0], [0, 1, 0, 1]]


def test_equally_loaded_experts_go_by_the_tokens_own_order() -> None:
    """With no load at all, K = 2: the router's own choice, though expert 2 is viable."""
    assert experts(half(load_updates=1), SCORES, top_k=2)[1:] == [[0, 1]] * 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[Laser, Scores, TokenGroups]:
    """Draw flat and peaked scores with ties, choices by other scores, and ineligible experts."""
    ep_size, n_experts = draw(st.integers(1, 3)), draw(st.integers(2, 9))
    top_k = draw(st.integers(1, n_experts))
    counted_BS = torch.rand(
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        generator=(seeded := torch.Generator().manual_seed(draw(st.integers(0, 2**20)))),
    ) < draw(st.sampled_from([0.5, 1.0]))
    groups = group_tokens(counted_BS, ep_size=ep_size)
    shape = (groups.n_tokens, n_experts)
    levels = draw(st.sampled_from([1, 3, 1000]))
    spread = draw(st.sampled_from([0.5, 2.0, 6.0]))
    score_TE = (torch.randint(levels, shape, generator=seeded) / levels * spread).softmax(dim=1)
    choice_TE = eligible_TE = None
    if draw(st.booleans()):
        choice_TE = score_TE + torch.randint(3, (n_experts,), generator=seeded) / 4
    ranking_TE = score_TE if choice_TE is None else choice_TE
    if draw(st.booleans()):
        eligible_TE = torch.rand(shape, generator=seeded) < 0.7
        score_TE = score_TE.masked_fill(~eligible_TE, 0.0)
        ranking_TE = ranking_TE + eligible_TE * 10.0
    topk_TK = (ranking_TE + torch.rand(shape, generator=seeded) * 1e-4).topk(top_k).indices
    shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    method = Laser(
        ep_size=ep_size,
        peak_mass=draw(shares),
        viable_score=draw(shares),
        load_updates=draw(st.integers(1, 12)),
    )
    return method, Scores(score_TE, topk_TK, choice_TE, eligible_TE), groups


@settings(max_examples=300, deadline=None)
@given(problems())
def test_decision_and_definition_are_those_of_the_loops(
    problem: tuple[Laser, Scores, TokenGroups],
) -> None:
    method, scores, groups = problem
    eligible_TE = scores.eligible_TE
    if eligible_TE is None:
        eligible_TE = torch.ones_like(scores.score_TE, dtype=torch.bool)
    columns = (scores.score_TE, scores.ranking_TE, eligible_TE, scores.topk_TK)
    tokens = [Token(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    knobs = {knob: getattr(method, knob) for knob in ("peak_mass", "viable_score", "load_updates")}
    expected = assigned(tokens, groups.group_T.tolist(), **knobs)
    found = decide(method, scores, groups)
    token, slot = found.keep_TS.nonzero(as_tuple=True)
    experts = found.index_TS[token, slot]
    assert sorted(zip(token.tolist(), experts.tolist(), strict=True)) == sorted(expected)
    assert bool((found.keep_TS.sum(dim=1) == scores.topk_TK.shape[1]).all())  # nothing is dropped
    defined_TE = method.kept_pairs(_Routed(scores, eligible_TE, groups))  # type: ignore[arg-type]
    assert {(int(t), int(e)) for t, e in zip(*defined_TE.nonzero(), strict=True)} == expected
    order_T, bounds_P, width = _parts(groups, groups.n_tokens, method.load_updates)
    assert int(bounds_P.diff().amax()) <= width if groups.n_tokens else not len(order_T)


class _Routed:
    """The tokens of a layer as the definition reads them."""

    def __init__(self, scores: Scores, eligible_TE: Tensor, groups: TokenGroups) -> None:
        self.score_TE, self.ranking_TE = scores.score_TE.numpy(), scores.ranking_TE.numpy()
        self.eligible_TE, self.group_T = eligible_TE.numpy(), groups.group_T.numpy()
        self.top_k, self.n_experts = scores.topk_TK.shape[1], scores.score_TE.shape[1]
        self.chosen_TE = np.zeros(self.score_TE.shape, dtype=bool)
        np.put_along_axis(self.chosen_TE, scores.topk_TK.numpy(), True, axis=1)


def test_loads_even_out() -> None:
    """The fullest of 64 experts over the mean load, on random scores of 512 tokens.

    In few parts, tokens crowd at the experts that had the least load before: 8 are worse than none.
    """
    generator = torch.Generator().manual_seed(0)
    score_TE = torch.randn(512, 64, generator=generator).softmax(dim=1)
    peak = {}
    for updates in (1, 8, 64, 512):
        method = half(viable_score=0.1, load_updates=updates)
        chosen = [expert for row in experts(method, score_TE, top_k=8) for expert in row]
        peak[updates] = float(torch.bincount(torch.tensor(chosen)).max() / 64)
    assert peak == {1: 1.234375, 8: 1.3125, 64: 1.046875, 512: 1.015625}


def test_the_decision_compiles_as_one_graph_and_asks_the_device_nothing() -> None:
    groups = group_tokens(torch.ones(3, 4, dtype=torch.bool), ep_size=3)
    score_TE = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    topk_TK = score_TE.topk(2, dim=1).indices
    method = Laser(ep_size=3, load_updates=2)

    def decision(score_TE: Tensor, topk_TK: Tensor) -> tuple[Tensor, Tensor]:
        found = decide(method, Scores(score_TE, topk_TK), groups)
        return found.index_TS, found.keep_TS

    compiled = torch.compile(decision, fullgraph=True, backend="eager")
    for one, other in zip(decision(score_TE, topk_TK), compiled(score_TE, topk_TK), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("knob", "value"),
    [("peak_mass", 1.1), ("peak_mass", "half"), ("viable_score", -0.1), ("load_updates", 0)],
)
def test_a_wrong_knob_is_one_line(knob: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{knob}={value}: must be .*for example {knob}=") as one:
        Laser(**{knob: value})
    assert "\n" not in str(one.value)


def test_canonical_form_and_identity() -> None:
    assert Laser(peak_mass=0.0).canonical() == Baseline()
    assert Laser(load_updates=1).canonical() == Baseline()
    always = Laser(peak_mass=0.0, renormalize="always").canonical()
    assert Laser(load_updates=1, renormalize="always").canonical() == always != Baseline()
    assert Laser(ep_size=2).canonical() == Laser(ep_size=2)
    assert Laser(ep_size=2).identity() == {
        "method": "laser",
        "ep_size": 2,
        "count_padding": False,
        "decode": "unconstrained",
        "renormalize": "before",
        "peak_mass": 0.75,
        "viable_score": 0.25,
        "load_updates": 64,
    }
    assert Laser(load_updates=8).label == "laser-mass0.75-viable0.25-updates8"


def test_processes_are_the_ranks_that_balance() -> None:
    """A process knows the loads of its own tokens alone, which is what a rank goes by."""
    Laser(ep_size=4).check_processes(4)
    with pytest.raises(UsageError, match=r"^ep_size=1: 4 processes .* set ep_size=4"):
        Laser().check_processes(4)
