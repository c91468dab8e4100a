"""LASER on tiny models: it changes the experts, evens out their loads, and passes the proofs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError
from capmoe_eval.extensions.laser import Laser, assign
from capmoe_eval.wrapper.layers import find_moe_layers, is_experts
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make

pytestmark = pytest.mark.numeric

BATCH = {"tokens": batch(n_sequences=4, n_positions=6)}
FLAT = Laser(peak_mass=1.0, viable_score=0.0)  # every expert is a candidate of every token


@torch.no_grad()
def run(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    logits: Tensor = model(tokens, **options).logits
    return logits


def experts_input(model: nn.Module, **call: Any) -> list[Tensor]:
    """Return the experts [N, S] that each layer is called with; the number of experts is none."""
    called: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _m, args: called.append(args[1].clone()))
        for module in model.modules()
        if is_experts(module)
    ]
    run(model, **call)
    for hook in hooks:
        hook.remove()
    return called


def loads(index_NS: Tensor, n_experts: int = 8) -> Tensor:
    return torch.bincount(index_NS[index_NS < n_experts], minlength=n_experts)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral"])
def test_it_changes_the_model_and_every_token_keeps_k_experts(family: str) -> None:
    """The test that fails if the method changes nothing."""
    model = make(family)
    stock, layers = run(model, **BATCH), find_moe_layers(model)
    for renormalize in ("before", "after"):
        method = Laser(peak_mass=1.0, viable_score=0.0, renormalize=renormalize)
        with capacity_aware(model, method) as meter:
            assert not torch.equal(run(model, **BATCH), stock)
            called = experts_input(model, **BATCH)
        report = meter.report()
        assert all(proof["passed"] is not False for proof in report["proofs"].values())
        assert report["proofs"]["pairs_as_defined"]["passed"]
        assert report["proofs"]["stock_at_infinity"]["method"] == "laser"
        summary = report["summary"]
        assert summary["dropped"] == summary["added"] > 0
        assert summary["lost_all"] == 0
        for layer, index_NS in zip(layers, called, strict=True):
            assert bool(((index_NS < layer.n_experts).sum(dim=1) == layer.top_k).all())
    assert torch.equal(run(model, **BATCH), stock)


def test_loads_are_even_where_every_expert_is_viable() -> None:
    """24 tokens of 3 experts each, on 8 experts: 9 for each, whatever the ranks."""
    model = make("olmoe")
    before = experts_input(model, **BATCH)
    with capacity_aware(model, FLAT):
        after = experts_input(model, **BATCH)
    assert all(loads(index_NS).tolist() == [9] * 8 for index_NS in after)
    assert all(int(loads(index_NS).max()) > 9 for index_NS in before)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_peaked_scores_give_the_stock_model(family: str) -> None:
    """At peak_mass near 0 the whole decision is made, and is the router's own, bit for bit."""
    model = make(family)
    stock = run(model, **BATCH)
    with capacity_aware(model, Laser(peak_mass=1e-6)) as meter:
        assert torch.equal(run(model, **BATCH), stock)
    assert meter.summary()["added"] == 0


def test_pads_have_no_load() -> None:
    """What pads are, and how many, changes nothing."""
    model = make("olmoe")
    mask_BS = torch.ones(4, 6, dtype=torch.long)
    mask_BS[1, 3:] = mask_BS[3, 2:] = 0
    decisions = []
    for token in (0, 50):
        tokens = BATCH["tokens"].masked_fill(mask_BS == 0, token)
        with capacity_aware(model, FLAT):
            decisions.append(experts_input(model, tokens=tokens, attention_mask=mask_BS)[0])
    assert torch.equal(*decisions)
    assert int(loads(decisions[0]).sum()) == int(mask_BS.sum()) * 3


def test_a_wrong_decision_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants compare with the definition in NumPy."""
    model = make("olmoe")
    right = assign.assign

    def by_stale_loads(*args: Any, **knobs: Any) -> Any:
        return right(*args, **knobs | {"load_updates": 1})

    monkeypatch.setattr(assign, "assign", by_stale_loads)
    with (
        capacity_aware(model, FLAT) as meter,
        pytest.raises(EnforcementError, match="pairs_as_defined"),
    ):
        run(model, **BATCH)
    assert meter.proofs()["pairs_as_defined"]["passed"] is False


def test_decode_steps_alone_are_balanced() -> None:
    """The prompt is the stock model's; in a step every token goes by the loads before it."""
    model: Any = make("olmoe")
    called: list[Tensor] = []
    experts: nn.Module = model.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(lambda _m, args: called.append(args[1].clone()))
    method = Laser(peak_mass=1.0, viable_score=0.0, decode="only")
    with capacity_aware(model, method, verify=False):
        model.generate(BATCH["tokens"], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    handle.remove()
    assert int(loads(called[0]).max()) > 9
    for step in called[1:]:  # 12 pairs on 8 experts
        assert sorted(loads(step).tolist()) == [1] * 4 + [2] * 4
