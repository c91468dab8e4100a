"""placement=eplb: which experts share a device, and nothing else, follows the placement."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from capmoe_eval.routing.assign import assign, bucket_limits
from capmoe_eval.routing.groups import group_tokens
from capmoe_eval.routing.homes import by_rank, rank_of
from capmoe_eval.routing.reference import assign_reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores
from tests.routing.problems import Case, cases, decide, kept_pairs

# Token Drop and its metrics differ in their keys alone.
PLACED = ("score", "random", "expanded_drop", "token_reroute", "xshare")


@st.composite
def placed_cases(draw: st.DrawFn, names: tuple[str, ...] = PLACED) -> Case:
    """Cases of several ranks whose experts are placed at random."""
    case = draw(cases(names, gammas=(0.1, 0.5, 0.75, 1.0, 1.5)))
    n_experts, asked = case.n_experts, case.method
    assume(n_experts > 1)
    ranks = draw(st.sampled_from([r for r in range(2, n_experts + 1) if n_experts % r == 0]))
    local = asked.candidate_rule == "local" and draw(st.booleans())
    method = dataclasses.replace(
        asked,
        ep_size=ranks,
        granularity="expert" if local else "device",
        expert_budget=min(asked.expert_budget, 0.75),
        placement="eplb",
    )
    assume(method.is_placed)
    groups = group_tokens(case.counted_BS, ep_size=ranks, scope=method.scope)
    return dataclasses.replace(case, method=method, groups=groups)


def pairs_of(case: Case, stream: tuple[int, int] = (0, 0)) -> set[tuple[int, int]]:
    assignment = decide(case, stream)
    return set(kept_pairs(assignment.index_TS, assignment.keep_TS))


@pytest.mark.parametrize("name", PLACED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_placement_decides_as_its_definition(name: str, data: st.DataObject) -> None:
    case = data.draw(placed_cases((name,)))
    assert pairs_of(case, (1, 2)) == assign_reference(case.problem((1, 2)), case.method)


@settings(max_examples=60, deadline=None)
@given(placed_cases())
def test_blocks_as_a_placement_are_blocks_bit_for_bit(case: Case) -> None:
    in_blocks = dataclasses.replace(case.method, placement="contiguous")
    blocks_RN = torch.arange(case.n_experts).view(case.method.ep_size, -1)
    by_blocks, by_placement = (
        assign(
            case.scores, method, case.groups, image_T=case.image_T, stream=(1, 2), calibrated=known
        )
        for method, known in ((in_blocks, None), (case.method, blocks_RN))
    )
    assert torch.equal(by_blocks.index_TS, by_placement.index_TS)
    assert torch.equal(by_blocks.keep_TS, by_placement.keep_TS)


@settings(max_examples=80, deadline=None)
@given(placed_cases(("score", "order", "expanded_drop", "token_reroute", "xshare")))
def test_renumbered_experts_in_blocks_decide_as_the_placement(case: Case) -> None:
    """Without ties: a tie goes to the lower number, which is another after renumbering."""
    old_E = case.placed_RN.flatten()  # of each new number
    generator = torch.Generator().manual_seed(case.seed)
    score_TE = torch.rand(case.scores.score_TE.shape, generator=generator, dtype=torch.float64)
    score_TE = (score_TE + 0.01).float()
    topk_TK = score_TE.topk(case.top_k, dim=1).indices
    assume(len(score_TE.unique()) == score_TE.numel())
    own = dataclasses.replace(case, scores=Scores(score_TE, topk_TK))
    blocks = dataclasses.replace(
        case,
        scores=Scores(score_TE[:, old_E], old_E.argsort()[topk_TK]),
        method=dataclasses.replace(case.method, placement="contiguous"),
    )
    assert pairs_of(own) == {(token, int(old_E[new])) for token, new in pairs_of(blocks)}


@settings(max_examples=60, deadline=None)
@given(placed_cases(("score", "random", "expanded_drop", "token_reroute")))
def test_the_devices_of_the_placement_keep_their_bound(case: Case) -> None:
    assume(case.method.bound == "device")
    limits = bucket_limits(case.method, case.groups, top_k=case.top_k, n_experts=case.n_experts)
    group = case.groups.group_T.tolist()
    load = Counter((group[t], case.home[e]) for t, e in pairs_of(case))
    assert all(count <= limits[g] for (g, _), count in load.items())


def test_a_placement_changes_who_is_dropped() -> None:
    """Two busy experts of one block, on two devices: nothing has to be dropped."""
    scores = Scores(torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4), torch.tensor([[0, 1]] * 4))
    groups = group_tokens(torch.ones(1, 4, dtype=torch.bool), ep_size=2)
    apart_RN = torch.tensor([[0, 2], [1, 3]])
    kept = {}
    for name, placement, known in (("eplb", "eplb", apart_RN), ("blocks", "contiguous", None)):
        method = Method("score", 1.0, ep_size=2, granularity="device", placement=placement)
        kept[name] = int(assign(scores, method, groups, calibrated=known).keep_TS.sum())
    assert kept == {"eplb": 8, "blocks": 4}
    # Candidates of the token's own rank, whose experts they are.
    local = Method("expanded_drop", 2.0, ep_size=2, placement="eplb")
    found = assign(scores, local, groups, calibrated=apart_RN)
    assert {e for _, e in kept_pairs(found.index_TS, found.keep_TS)} == {0, 1, 2}


def test_ranks_and_their_experts() -> None:
    placed_RN = torch.tensor([[1, 3], [0, 2]])
    load_E = torch.tensor([10, 11, 12, 13])
    assert by_rank(load_E, 2, placed_RN).tolist() == [[11, 13], [10, 12]]
    assert by_rank(load_E, 2, None).tolist() == [[10, 11], [12, 13]]
    assert rank_of(torch.arange(4), 2, placed_RN).tolist() == [1, 0, 1, 0]
    assert rank_of(torch.arange(4), 2, None).tolist() == [0, 0, 1, 1]


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
        Method(name, gamma, placement=placement, **knobs)  # type: ignore[arg-type]
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
        method = Method(name, gamma, ep_size=4, placement="eplb", **knobs)
        identity = method.identity()
        assert identity.pop("placement") == "eplb" and method.calibration == "expert_loads"
        assert dataclasses.replace(method, placement="contiguous").identity() == identity


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(UsageError, match="placement=eplb: macs reroutes within the blocks of"):
        Method("macs", 1.0, ep_size=4, placement="eplb")
    with pytest.raises(UsageError, match="placement=eplb: gamma=adaptive chooses by the loads of"):
        knobs = {"ep_size": 4, "granularity": "device", "placement": "eplb"}
        Method("score", "adaptive", budget=0.1, **knobs)  # type: ignore[arg-type]
    adaptive = Method("score", "adaptive", budget=0.1, ep_size=4, placement="eplb")  # type: ignore[arg-type]
    assert not adaptive.is_placed  # each expert has its own capacity
