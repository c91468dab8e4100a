"""Models as people have them: of one configuration, with another stock kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import logits, make

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
