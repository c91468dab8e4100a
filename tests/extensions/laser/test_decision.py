"""LASER's decision on tensors, its definition in NumPy, and loops over lists: they agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from capmoe_eval.routing.definition import RoutedTokens
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import TokenGroups, group_tokens
from tests.routing.drawing import drawing
from tests.routing.problems import Case, cases
from tests.routing.reference import assign_reference

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


@settings(max_examples=200, deadline=None)
@given(cases(("laser",)))
def test_the_definition_for_the_invariants_is_that_of_the_loops(case: Case) -> None:
    """The decision is compared with the loops where all methods are (tests/routing)."""
    expected = assign_reference(case.problem(), case.method)
    defined_TE = case.method.kept_pairs(_routed(case))
    assert {(int(t), int(e)) for t, e in zip(*defined_TE.nonzero(), strict=True)} == expected
    assert len(expected) == case.groups.n_tokens * case.top_k  # nothing is dropped


def _routed(case: Case) -> RoutedTokens:
    """Return the tokens of a layer as the invariants have them."""
    scores, problem = case.scores, case.problem()
    return RoutedTokens(
        layer=0,
        forward=0,
        score_TE=scores.score_TE.numpy(),
        ranking_TE=scores.ranking_TE.numpy(),
        eligible_TE=np.array(problem.eligible),
        topk_TK=scores.topk_TK.numpy(),
        weight_TK=np.zeros(scores.topk_TK.shape),
        weight_eps=0.0,
        weight_smallest=0.0,
        group_T=case.groups.group_T.numpy(),
        rank_T=case.groups.rank_T.numpy(),
        rank_E=np.zeros(case.n_experts, dtype=np.int64),
        unit_E=np.arange(case.n_experts),
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_a_part_has_at_most_the_tokens_that_its_width_allows(
    sizes: list[int], load_updates: int
) -> None:
    group_T = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = TokenGroups(group_T, group_T, group_T, tuple(sizes), len(group_T))
    order_T, bounds_P, width = _parts(groups, len(group_T), load_updates)
    assert sorted(order_T.tolist()) == list(range(len(group_T)))
    assert int(bounds_P[-1]) == len(group_T)
    assert max(bounds_P.diff().tolist(), default=0) <= width


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
    [
        ("peak_mass", 1.1),
        ("peak_mass", "half"),
        ("viable_score", -0.1),
        ("viable_score", 1.0),
        ("load_updates", 0),
    ],
)
def test_a_wrong_knob_is_one_line(knob: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{knob}={value}: must be .*for example {knob}=") as one:
        Laser(**{knob: value})
    assert "\n" not in str(one.value)


def test_canonical_form_and_identity() -> None:
    assert Laser(peak_mass=0.0).canonical() == Laser(load_updates=1).canonical() == Baseline()
    stays = [Laser(peak_mass=0.0), Laser(load_updates=1, ep_size=4), Laser(viable_score=0.5)]
    first, second, other = (replace(one, renormalize="always").canonical() for one in stays)
    assert first == second != other
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


def test_golden() -> None:
    path = Path(__file__).with_name("golden.txt")
    drawn = [half(), half(peak_mass=1.0, viable_score=0.1)]
    assert drawing([*drawn, replace(drawn[1], ep_size=2)]) == path.read_text(encoding="utf-8")


def test_processes_are_the_ranks_that_balance() -> None:
    """A process knows the loads of its own tokens alone, which is what a rank goes by."""
    Laser(ep_size=4).check_processes(4)
    with pytest.raises(UsageError, match=r"^ep_size=1: 4 processes .* set ep_size=4"):
        Laser().check_processes(4)
