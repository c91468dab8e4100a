"""Models as people have them: of one configuration, in training, without a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.errors import EnforcementError
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, logits, make

pytestmark = pytest.mark.numeric


def twins() -> tuple[Any, Any]:
    """Return two models that were built from one configuration object."""
    first = make("olmoe")
    other = type(first)(first.config).eval()
    other.load_state_dict(make("olmoe", seed=1).state_dict())
    assert first.config is other.config
    return first, other


# One configuration, two models.


def test_two_models_of_one_configuration_run_under_two_capacities() -> None:
    first, other = twins()
    stock, stock_of_other = logits(first), logits(other)
    loops = dict(vars(GenerationMixin))
    with capacity_aware(first, "score", gamma=0.5):
        alone = logits(first)
    with capacity_aware(other, "order", gamma=1.0):
        other_alone = logits(other)
    assert not torch.equal(alone, stock)
    with capacity_aware(first, "score", gamma=0.5) as meter:
        assert torch.equal(logits(other), stock_of_other)
        with capacity_aware(other, "order", gamma=1.0) as other_meter:
            assert torch.equal(logits(first), alone)
            assert torch.equal(logits(other), other_alone)
        assert dict(vars(GenerationMixin)) != loops
        assert torch.equal(logits(first), alone)
        assert torch.equal(logits(other), stock_of_other)
    assert torch.equal(logits(first), stock)
    assert dict(vars(GenerationMixin)) == loops
    assert (meter.forwards, other_meter.forwards) == (2, 1)


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
        logits(model)
        assert not rows
        model.set_experts_implementation("batched_mm")
        logits(model)
    kept = [sum(layer["load_after"]) // 2 for layer in meter.report()["layers"]]
    assert rows == kept
    assert model.config._experts_implementation == "batched_mm"


# Training.


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
