"""The definition that forwards are compared with: the loops' own, and apart from the decision."""

from __future__ import annotations

import ast
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from capmoe_eval.wrapper.invariants import definition, others
from capmoe_eval.wrapper.invariants.check import EVERY, is_examined
from capmoe_eval.wrapper.invariants.definition import RoutedTokens
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper import invariants
from capmoe_eval.wrapper.session import capacity_aware
from tests.routing.problems import GAMMAS, Case, cases
from tests.routing.reference import assign_reference, weights_reference
from tests.wrapper.models import batch, make


def routed_tokens(case: Case, stream: tuple[int, int]) -> RoutedTokens:
    """The tokens of a random problem, with groups and capacities from its mask alone."""
    counted_BS = case.counted_BS.numpy()
    sequence_T = np.nonzero(counted_BS)[0]
    group_T, rank_T = definition.capacity_groups(sequence_T, len(counted_BS), case.method, 0, 1)
    score_TE = case.scores.score_TE.numpy()
    eligible_TE = case.scores.eligible_TE
    calibrated = case.bias_E if case.method.weighs_tokens else case.calibrated
    return RoutedTokens(
        case.method,
        *stream,
        score_TE=score_TE,
        ranking_TE=case.scores.ranking_TE.numpy(),
        eligible_TE=np.ones(score_TE.shape, bool) if eligible_TE is None else eligible_TE.numpy(),
        topk_TK=case.scores.topk_TK.numpy(),
        weight_TK=case.scores.score_TE.gather(1, case.scores.topk_TK).double().numpy(),
        weight_eps=torch.finfo(torch.float32).eps,
        weight_smallest=torch.finfo(torch.float32).smallest_normal,
        group_T=group_T,
        rank_T=rank_T,
        image_T=case.image_T.numpy(),
        hidden_TH=case.hidden_TH.numpy(),
        calibrated=None if calibrated is None else calibrated.numpy(),
    )


@pytest.mark.parametrize("name", method_names())
@settings(max_examples=150, deadline=None)
@given(data=st.data(), stream=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_the_definition_is_that_of_the_loops(
    name: str, data: st.DataObject, stream: tuple[int, int]
) -> None:
    case = data.draw(cases((name,)))
    tokens = routed_tokens(case, stream)
    if case.method.weighs_tokens:
        kept_TE = others.weighted_pairs(tokens, case.unit_T.numpy())
    elif case.method.bounds_activation:
        kept_TE = others.kept_pairs(tokens)
    else:
        kept_TE = definition.kept_pairs(tokens)
        assert definition.buckets_beyond(tokens, kept_TE) == 0
    expected = assign_reference(case.problem(stream), case.method)
    assert set(zip(*(index.tolist() for index in np.nonzero(kept_TE)), strict=True)) == expected


@settings(max_examples=200, deadline=None)
@given(cases(("macs",)))
def test_weights_of_tokens_are_those_of_the_loops_within_the_rounding_of_float32(
    case: Case,
) -> None:
    tokens = routed_tokens(case, (0, 0))
    weight_T, error_T = others.token_weights(tokens)
    method, groups = case.method, case.groups.group_T.tolist()
    exact = weights_reference(
        case.hidden_TH.tolist(), case.image_T.tolist(), groups, getattr(method, "delta", 1.0)
    )
    np.testing.assert_allclose(weight_T / 2**24, exact, rtol=1e-9, atol=1e-9)
    if method.weighs_tokens:
        assert (abs(case.unit_T.numpy() - weight_T) <= error_T).all()


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
    n_experts = local * ranks
    knobs = {"ep_size": ranks, "granularity": granularity, "rounding": rounding}
    method = create_method("score", 0.5, **knobs).at(gamma)
    sharing = local if method.granularity == "device" else 1
    exact = sharing * Fraction(str(gamma)) * tokens * top_k / n_experts
    limit = definition.capacities(method, np.array([tokens]), top_k, n_experts)[0]
    assert limit <= sharing * tokens
    if limit < sharing * tokens:
        beyond = limit - exact
        assert 0 <= beyond < 1 if method.rounding == "ceil" else -1 < beyond <= 0


def test_forwards_are_examined_from_the_first_and_ever_again() -> None:
    examined = [number for number in range(200) if is_examined(number)]
    assert examined == [0, 1, 2, 4, 8, 16, 32, 64, 128, 3 * EVERY]


def test_the_definition_shares_no_function_with_the_decision() -> None:
    """Of the project they import what a method is, the recipe of a gate and each other."""
    allowed = {"routing.method", "wrapper.gates", "wrapper.layers"}
    for path in Path(invariants.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("capmoe_eval."):
                module = str(node.module).removeprefix("capmoe_eval.")
                assert module.startswith("wrapper.invariants") or module in allowed, path


@pytest.mark.parametrize("decode", ["unconstrained", "only"])
def test_what_was_not_checked_has_not_passed(decode: str) -> None:
    model = make("olmoe")
    asked = ["bound_holds", "pads_take_no_slot", "overload_drops", "tokens_counted"]
    asked += ["pairs_valid", "pairs_as_defined", "weights_as_defined"]
    with torch.no_grad():
        cache = model(batch()).past_key_values
    with capacity_aware(model, "score", gamma=0.5, decode=decode) as meter, torch.no_grad():
        before = meter.proofs()
        if decode == "only":
            model(batch())  # a prompt
        else:
            model(batch()[:, :1], past_key_values=cache)  # a decode step
        after = meter.proofs()
    for name in asked:
        assert before[name] == {"passed": None, "why": "none of 0 forwards was under the method"}
        why = f"none of 1 forwards was under the method (decode={decode})"
        assert after[name] == {"passed": None, "why": why}


def test_a_share_of_the_forwards_is_examined_and_said() -> None:
    model, n_experts = make("olmoe"), 8
    with capacity_aware(model, "score", gamma=0.5, ep_size=2) as meter, torch.no_grad():
        for _ in range(10):
            model(batch())
    for name in ("pairs_as_defined", "weights_as_defined", "pairs_valid"):
        assert meter.proofs()[name] == {
            "passed": True,
            "violations": 0,
            "examined": {"forwards": 5, "of": 10, "buckets": 5 * 2 * 2 * n_experts},
        }
