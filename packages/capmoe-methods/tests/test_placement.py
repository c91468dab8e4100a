"""placement=eplb: which experts share a device, and nothing else, follows the placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.decision import Scores
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.registry import method_class, method_names
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, cases, decide, kept_pairs

from capmoe_methods.eplb_placement.calibration import experts_of_ranks

PLACED = [name for name in method_names() if "placement" in declared_knobs(method_class(name))]


@st.composite
def placed_cases(draw: st.DrawFn, names: Sequence[str] = PLACED) -> Case:
    """Cases of several ranks whose experts are placed at random."""
    case = draw(cases(names, gammas=(0.1, 0.5, 0.75, 1.0, 1.5)))
    n_experts, drawn = case.n_experts, case.method
    assume(n_experts > 1 and "placement" in declared_knobs(type(drawn)))
    ranks = draw(st.sampled_from([r for r in range(2, n_experts + 1) if n_experts % r == 0]))
    local = isinstance(drawn, ExpandedDrop) and drawn.candidates == "local" and draw(st.booleans())
    knobs = {"granularity": "expert" if local else "device", "placement": "eplb"}
    method = dataclasses.replace(drawn, ep_size=ranks, **knobs).canonical()  # type: ignore[type-var]
    assume(method.is_placed)
    return case.of(method)


@settings(max_examples=60, deadline=None)
@given(placed_cases())
def test_blocks_as_a_placement_are_blocks_bit_for_bit(case: Case) -> None:
    blocks_RN = torch.arange(case.n_experts).view(case.method.ep_size, -1)
    by_blocks = decide(case.with_knobs(placement="contiguous"), (1, 2))
    by_placement = decide(case, (1, 2), calibrated=blocks_RN)
    assert torch.equal(by_blocks.index_TS, by_placement.index_TS)
    assert torch.equal(by_blocks.keep_TS, by_placement.keep_TS)


@settings(max_examples=80, deadline=None)
@given(placed_cases(("score", "order", "expanded_drop", "token_reroute", "xshare")))
def test_renumbered_experts_in_blocks_decide_as_the_placement(case: Case) -> None:
    """Without ties: a tie goes to the lower number, which is another after renumbering."""
    old_E = case.calibrated.flatten()  # of each new number
    generator = torch.Generator().manual_seed(case.seed)
    score_TE = torch.rand(case.scores.score_TE.shape, generator=generator, dtype=torch.float64)
    score_TE = (score_TE + 0.01).float()
    topk_TK = score_TE.topk(case.top_k, dim=1).indices
    assume(len(score_TE.unique()) == score_TE.numel())
    placed = dataclasses.replace(case, scores=Scores(score_TE, topk_TK))
    renumbered = Scores(score_TE[:, old_E], old_E.argsort()[topk_TK])
    blocks = dataclasses.replace(case, scores=renumbered).with_knobs(placement="contiguous")
    pairs = {(token, int(old_E[new])) for token, new in kept_pairs(decide(blocks))}
    assert set(kept_pairs(decide(placed))) == pairs


def test_experts_go_by_falling_load_to_the_rank_with_the_lowest_load() -> None:
    assert experts_of_ranks([9, 8, 1, 1], 2).tolist() == [[0, 3], [1, 2]]
    assert experts_of_ranks([8, 7, 6, 5, 0, 0, 0, 0], 4).tolist() == [
        *([0, 7], [1, 6], [2, 5], [3, 4]),
    ]
    with pytest.raises(UsageError, match=r"^placement=eplb: the calibration saw no token under"):
        experts_of_ranks([0, 0], 2)
    with pytest.raises(UsageError, match="4 experts cannot be spread evenly over 3 ranks"):
        experts_of_ranks([1, 2, 3, 4], 3)
