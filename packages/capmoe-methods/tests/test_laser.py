"""LASER: loads even out, every token keeps K experts, and the proofs hold on tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.decision import TokenGroups
from capmoe_eval.wrapper.layers import find_moe_layers, is_experts
from capmoe_eval.wrapper.session import capacity_aware
from hypothesis import given
from hypothesis import strategies as st
from tests.wrapper.models import batch, make
from torch import Tensor, nn

from capmoe_methods.laser import Laser, decision
from capmoe_methods.laser.decision import parts_of_groups

FLAT = Laser(peak_mass=1.0, viable_score=0.0)  # every expert is a candidate of every token
TOKENS = batch(n_sequences=4, n_positions=6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_a_part_has_at_most_the_tokens_that_its_width_allows(
    sizes: list[int], load_updates: int
) -> None:
    group_T = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = TokenGroups(group_T, group_T, group_T, tuple(sizes), len(group_T))
    order_T, bounds_P, width = parts_of_groups(groups, len(group_T), load_updates)
    assert sorted(order_T.tolist()) == list(range(len(group_T)))
    assert int(bounds_P[-1]) == len(group_T)
    assert max(bounds_P.diff().tolist(), default=0) <= width


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    logits: Tensor = model(TOKENS).logits
    return logits


def experts_input(model: nn.Module) -> list[Tensor]:
    """Return the experts [N, S] that each layer is called with; the number of experts is none."""
    called: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _m, args: called.append(args[1].clone()))
        for module in model.modules()
        if is_experts(module)
    ]
    run(model)
    for hook in hooks:
        hook.remove()
    return called


@pytest.mark.numeric
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral"])
def test_it_changes_the_model_and_every_token_keeps_k_experts(family: str) -> None:
    """The test that fails if the method changes nothing."""
    model = make(family)
    stock, layers = run(model), find_moe_layers(model)
    for renormalize in ("before", "after"):
        with capacity_aware(model, replace(FLAT, renormalize=renormalize)) as meter:
            assert not torch.equal(run(model), stock)
            called = experts_input(model)
        report = meter.report()
        assert all(proof["passed"] is not False for proof in report["proofs"].values())
        assert report["proofs"]["pairs_as_defined"]["passed"]
        assert report["proofs"]["stock_at_infinity"]["method"] == "laser"
        assert report["summary"]["dropped"] == report["summary"]["added"] > 0
        assert report["summary"]["lost_all"] == 0
        for layer, index_NS in zip(layers, called, strict=True):
            assert ((index_NS < layer.n_experts).sum(dim=1) == layer.top_k).all()
    assert torch.equal(run(model), stock)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_peaked_scores_give_the_stock_model(family: str) -> None:
    """At peak_mass near 0 the whole decision is made, and is the router's own, bit for bit."""
    model = make(family)
    stock = run(model)
    with capacity_aware(model, Laser(peak_mass=1e-6)) as meter:
        assert torch.equal(run(model), stock)
    assert meter.summary()["added"] == 0


def test_a_wrong_decision_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants compare with the definition in NumPy."""
    model, right = make("olmoe"), decision.assign

    def by_stale_loads(scores: Any, tokens: Any, method: Laser) -> Any:
        return right(scores, tokens, replace(method, load_updates=1))

    monkeypatch.setattr(decision, "assign", by_stale_loads)
    with (
        capacity_aware(model, FLAT) as meter,
        pytest.raises(EnforcementError, match="pairs_as_defined"),
    ):
        run(model)
    assert meter.proofs()["pairs_as_defined"]["passed"] is False
