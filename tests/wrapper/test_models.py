"""Models as people have them: of one configuration, in training, without a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.errors import EnforcementError
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make

pytestmark = pytest.mark.numeric


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    return model(batch()).logits


def twins() -> tuple[Any, Any]:
    """Return two models that were built from one configuration object."""
    one = make("olmoe")
    other = type(one)(one.config).eval()
    other.load_state_dict(make("olmoe", seed=1).state_dict())
    assert one.config is other.config
    return one, other


# One configuration, two models.


def test_a_model_of_the_same_configuration_stays_stock() -> None:
    one, other = twins()
    stock, stock_of_other = run(one), run(other)
    with capacity_aware(one, "score", gamma=0.5):
        capped = run(one)
        assert torch.equal(run(other), stock_of_other)
    assert not torch.equal(capped, stock)
    assert torch.equal(run(one), stock)


def test_two_models_of_one_configuration_run_under_two_capacities() -> None:
    one, other = twins()
    with capacity_aware(one, "score", gamma=0.5):
        alone = run(one)
    with capacity_aware(other, "order", gamma=1.0):
        other_alone = run(other)
    with capacity_aware(one, "score", gamma=0.5) as meter:
        with capacity_aware(other, "order", gamma=1.0) as other_meter:
            assert torch.equal(run(one), alone)
            assert torch.equal(run(other), other_alone)
        assert torch.equal(run(one), alone)
        stock_of_other = run(other)
    assert torch.equal(run(other), stock_of_other)
    assert (meter.forwards, other_meter.forwards) == (2, 1)


def test_blocks_that_end_in_another_order_leave_both_as_they_were() -> None:
    one, other = twins()
    stock, stock_of_other = run(one), run(other)
    first = capacity_aware(one, "score", gamma=0.5)
    second = capacity_aware(other, "score", gamma=0.5)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(run(one), stock)
    assert not torch.equal(run(other), stock_of_other)
    second.__exit__(None, None, None)
    assert torch.equal(run(other), stock_of_other)
    assert one.config._experts_implementation == "grouped_mm"


def test_a_stock_kernel_that_is_chosen_inside_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``generate`` chooses another for decoding on a GPU."""
    model = make("olmoe", experts="grouped_mm")
    batched_mm = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    rows: list[int] = []

    def noting(experts: nn.Module, hidden: Tensor, *call: Tensor) -> Tensor:
        rows.append(len(hidden))
        return batched_mm(experts, hidden, *call)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", noting)
    with capacity_aware(model, "score", gamma=0.5) as meter:
        run(model)
        assert not rows
        model.set_experts_implementation("batched_mm")
        run(model)
    kept = [sum(layer["load_after"]) // 2 for layer in meter.report()["layers"]]
    assert rows == kept
    assert model.config._experts_implementation == "batched_mm"


# Training.


def test_every_part_keeps_its_mode() -> None:
    model = make("olmoe")
    model.train()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    with capacity_aware(model, "score", gamma=0.5):
        assert modes == {name: module.training for name, module in model.named_modules()}
    assert modes == {name: module.training for name, module in model.named_modules()}


def test_the_entry_is_proven_in_evaluation_mode() -> None:
    model = make("olmoe")
    model.train()
    seen: list[bool] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, _args: seen.append(module.training)
    )
    with capacity_aware(model, "score", gamma=0.5):
        pass
    handle.remove()
    assert seen
    assert not any(seen)


def gradients(model: Any, seeds: list[int], **knobs: Any) -> dict[str, Tensor]:
    """Return the gradients of a loss over several batches, each with its own backward pass."""
    model.train()
    model.zero_grad()
    with capacity_aware(model, **knobs) as meter:
        for seed in seeds:
            tokens = batch(seed)
            model(tokens, labels=tokens).loss.backward()
    assert meter.forwards == meter.report()["layers"][0]["forwards"] == len(seeds)
    assert meter.summary()["tokens"] == 48 * len(seeds)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["score", "random", "expanded_drop"])
def test_gradient_checkpointing_gives_the_same_gradients(method: str, reentrant: bool) -> None:
    model = make("olmoe")
    knobs = {"method": method, "gamma": 0.5, "ep_size": 2}
    expected = gradients(model, [0, 1], **knobs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    again = gradients(model, [0, 1], **knobs)
    for name, gradient in expected.items():
        # The same sums of a few terms, in another order: within a few units of the largest.
        most = float(gradient.abs().max())
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=1e-5 * most)


def test_a_backward_pass_of_an_older_forward_is_refused() -> None:
    model = make("olmoe").train()
    model.gradient_checkpointing_enable()
    with capacity_aware(model, "score", gamma=0.5):
        losses = [model(batch(seed), labels=batch(seed)).loss for seed in (0, 1)]
        with pytest.raises(EnforcementError, match="computes another forward again"):
            losses[0].backward()


# Without a head.


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2"])
def test_a_base_model_runs_as_under_its_head(name: str) -> None:
    model = make(name)
    base = AutoModel.from_config(model.config).eval()
    base.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        with capacity_aware(model, "score", gamma=0.5) as expected_meter:
            expected = model(batch(), output_hidden_states=True).hidden_states[-1]
        with capacity_aware(base, "score", gamma=0.5) as meter:
            states = base(batch()).last_hidden_state
    assert torch.equal(states, expected)
    assert meter.summary() == expected_meter.summary()
    assert meter.proofs()["stock_at_infinity"]["passed"]
    assert meter.proofs()["stock_at_infinity"]["compared"] == 2 * 16 * 32
