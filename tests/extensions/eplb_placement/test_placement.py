"""placement=eplb: which experts share a device, and nothing else, follows the placement."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import declared_knobs
from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method, method_class, method_names
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.routing.problems import Case, assign, cases, decide, kept_pairs
from tests.routing.reference import assign_reference

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


def pairs_of(case: Case, stream: tuple[int, int] = (0, 0)) -> set[tuple[int, int]]:
    return set(kept_pairs(decide(case, stream)))


def in_blocks(case: Case) -> Case:
    """Return a case with contiguous blocks."""
    return case.of(dataclasses.replace(case.method, placement="contiguous"))  # type: ignore[type-var]


def rank_of(case: Case) -> dict[int, int]:
    """Return the rank that holds each expert."""
    assert case.calibrated is not None
    return {e: rank for rank, held in enumerate(case.calibrated.tolist()) for e in held}


@pytest.mark.parametrize("name", PLACED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_placement_decides_as_its_definition(name: str, data: st.DataObject) -> None:
    case = data.draw(placed_cases((name,)))
    assert pairs_of(case, (1, 2)) == assign_reference(case.problem((1, 2)), case.method)


@settings(max_examples=60, deadline=None)
@given(placed_cases())
def test_blocks_as_a_placement_are_blocks_bit_for_bit(case: Case) -> None:
    blocks_RN = torch.arange(case.n_experts).view(case.method.ep_size, -1)
    by_blocks = decide(in_blocks(case), (1, 2))
    by_placement = decide(case, (1, 2), calibrated=blocks_RN)
    assert torch.equal(by_blocks.index_TS, by_placement.index_TS)
    assert torch.equal(by_blocks.keep_TS, by_placement.keep_TS)


@settings(max_examples=80, deadline=None)
@given(placed_cases(("score", "order", "expanded_drop", "token_reroute", "xshare")))
def test_renumbered_experts_in_blocks_decide_as_the_placement(case: Case) -> None:
    """Without ties: a tie goes to the lower number, which is another after renumbering."""
    assert case.calibrated is not None
    old_E = case.calibrated.flatten()  # of each new number
    generator = torch.Generator().manual_seed(case.seed)
    score_TE = torch.rand(case.scores.score_TE.shape, generator=generator, dtype=torch.float64)
    score_TE = (score_TE + 0.01).float()
    topk_TK = score_TE.topk(case.top_k, dim=1).indices
    assume(len(score_TE.unique()) == score_TE.numel())
    own = dataclasses.replace(case, scores=Scores(score_TE, topk_TK))
    renumbered = Scores(score_TE[:, old_E], old_E.argsort()[topk_TK])
    blocks = in_blocks(dataclasses.replace(case, scores=renumbered))
    assert pairs_of(own) == {(token, int(old_E[new])) for token, new in pairs_of(blocks)}


@settings(max_examples=60, deadline=None)
@given(placed_cases(("score", "random", "expanded_drop", "token_reroute")))
def test_the_devices_of_the_placement_keep_their_bound(case: Case) -> None:
    assume(case.method.unit == "device")
    sizes = {"top_k": case.top_k, "n_experts": case.n_experts}
    limits = case.method.limits(case.groups.tokens, **sizes)
    group, rank = case.groups.group_T.tolist(), rank_of(case)
    load = Counter((group[t], rank[e]) for t, e in pairs_of(case))
    assert all(count <= limits[g] for (g, _), count in load.items())


def test_a_placement_changes_who_is_dropped() -> None:
    """Two busy experts of one block, on two devices: nothing has to be dropped."""
    scores = Scores(torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4), torch.tensor([[0, 1]] * 4))
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool), ep_size=2)
    apart_RN = torch.tensor([[0, 2], [1, 3]])
    kept = {}
    for placement, placed_RN in (("eplb", apart_RN), ("contiguous", None)):
        method = TokenDrop(gamma=1.0, ep_size=2, granularity="device", placement=placement)
        kept[placement] = int(assign(scores, method, groups, calibrated=placed_RN).keep_TS.sum())
    assert kept == {"eplb": 8, "contiguous": 4}
    # Candidates of the token's own rank, whose experts they are.
    local = ExpandedDrop(gamma=2.0, ep_size=2, placement="eplb")
    pairs = kept_pairs(assign(scores, local, groups, calibrated=apart_RN))
    assert {e for _, e in pairs} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "gamma", "knobs"),
    [
        *(
            (name, 1.0, {"ep_size": 4})
            for name in ("baseline", "order", "expert_drop", "oea", "sere")
        ),
        ("score", 1.0, {"ep_size": 4}),
        ("score", 1.0, {"ep_size": 1, "granularity": "device"}),
        ("score", 0.0, {"ep_size": 4, "granularity": "device"}),
        ("score", float("inf"), {"ep_size": 4, "granularity": "device"}),
        ("score", 4.0, {"ep_size": 4, "granularity": "device"}),
        ("token_reroute", 1.0, {"ep_size": 4}),
        ("xshare", None, {"ep_size": 4}),
        ("expanded_drop", 1.0, {"ep_size": 4, "candidates": "global"}),
        ("expanded_drop", float("inf"), {"ep_size": 4, "candidates": "ranked"}),
        ("expanded_drop", 1.0, {"ep_size": 1}),
    ],
)
def test_where_no_experts_share_anything_a_placement_is_none(
    name: str, gamma: float | None, knobs: dict[str, object]
) -> None:
    blocks, other = (
        create_method(name, gamma, placement=placement, **knobs)
        for placement in ("contiguous", "eplb")
    )
    assert blocks == other and "placement" not in blocks.identity()


def test_a_placement_is_part_of_an_identity_where_it_decides() -> None:
    for name, gamma, knobs in (
        ("device_drop", 1.0, {}),
        ("expanded_drop", 1.0, {}),
        ("expanded_drop", float("inf"), {}),
        ("xshare", None, {"granularity": "device"}),
    ):
        method = create_method(name, gamma, ep_size=4, placement="eplb", **knobs)
        identity = method.identity()
        assert identity.pop("placement") == "eplb" and method.calibration == "expert_loads"
        assert dataclasses.replace(method, placement="contiguous").identity() == identity


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(UsageError, match="placement=eplb: macs reroutes within the blocks of"):
        create_method("macs", 1.0, ep_size=4, placement="eplb")
    with pytest.raises(UsageError, match="placement=eplb: gamma=adaptive chooses by the loads of"):
        knobs = {"ep_size": 4, "granularity": "device", "placement": "eplb"}
        create_method("score", "adaptive", budget=0.1, **knobs)
    adaptive = create_method("score", "adaptive", budget=0.1, ep_size=4, placement="eplb")
    assert not adaptive.is_placed  # each expert has its own capacity
