"""MACS: the weights of tokens, the capacities of experts, and what becomes of the overflow."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from capmoe_eval.routing.decision import LayerContext
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.tokens import group_tokens
from definitions import macs as reference
from hypothesis import given, settings
from tests.routing.problems import Case, cases, decide, one_group

from capmoe_methods.macs import MACS
from capmoe_methods.macs.decision import (
    UNIT,
    Weighted,
    token_weights,
    weigh,
)

GAMMAS = [0.1, 0.5, 0.75, 1.0, 1.5, 3.0]


def weighted_of(case: Case) -> Weighted:
    """Return the weights and capacities of a case."""
    assert isinstance(case.method, MACS)
    sizes = {"top_k": case.top_k, "n_experts": case.n_experts}
    return weigh(case.method, case.groups, case.context(), **sizes)


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


def test_every_token_weighs_at_least_a_unit() -> None:
    """Four flat tokens and one that is not: at δ=100 the weight of the flat ones is below 2⁻²⁴."""
    hidden_TH = torch.zeros(5, 3)
    hidden_TH[0, 0] = 50.0
    units_T = token_weights(hidden_TH, torch.ones(5) > 0, one_group(5), 100.0)
    assert units_T.tolist() == [UNIT, 1, 1, 1, 1]


def test_a_group_without_a_token_has_no_weight_of_images() -> None:
    """The second rank's sequence is padding alone, and the third's has no image."""
    counted_BS = torch.tensor([[True, True], [False, False], [True, True]])
    groups = group_tokens(counted_BS, ep_size=3)
    image_T = torch.tensor([True, False, False, False])
    bias_E = torch.tensor([1, 0, -1])
    hidden_TH = torch.arange(8.0).view(4, 2)
    method = MACS(gamma=1.0, ep_size=3)
    layer = LayerContext(calibrated=bias_E, hidden_TH=hidden_TH, image_T=image_T)
    weighted = weigh(method, groups, layer, top_k=1, n_experts=3)
    assert weighted.visual_ratio_G.tolist() == [pytest.approx(1 / 3), 0.0, 0.0]
    assert weighted.limit_GE[1].tolist() == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(cases(("macs",), gammas=GAMMAS))
def test_equal_weights_without_modalities_and_rerouting_are_token_drop(case: Case) -> None:
    """Bit for bit, in the slots as in the pairs."""
    case = case.with_knobs(rho=0.0, reroute="none", ep_size=1)
    text = dataclasses.replace(case, image_T=torch.zeros_like(case.image_T))
    macs, drop = decide(text), decide(case.of(case.method.converted(TokenDrop)))
    assert torch.equal(macs.index_TS, drop.index_TS)
    assert torch.equal(macs.keep_TS, drop.keep_TS)
