"""The tolerances of logits are those that rounding needs, and far below what a drop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from capmoe_eval.wrapper.session import capacity_aware
from tests.rounding import tolerance
from tests.wrapper import images, models
from tests.wrapper.parallel import cases

pytestmark = pytest.mark.numeric

Case = tuple[Any, dict[str, Any], dict[str, float]]  # model, its inputs, the tolerance


def tiny(name: str) -> Case:
    return models.make(name), {"input_ids": models.batch()}, models.ROUNDING


def spread(family: str) -> Case:
    return cases.model(family, 2), cases.inputs(family), cases.ROUNDING


def with_images(family: str) -> Case:
    return images.make(family), images.batch(family), images.ROUNDING


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((tiny, name) for name in models.SUPPORTED),
        *((spread, family) for family in cases.TINY_FAMILIES),
        *((with_images, family) for family in images.FAMILIES),
    ],
)
@torch.no_grad()
def test_a_tolerance_is_that_of_rounding(make: Callable[[str], Case], name: str) -> None:
    model, inputs, allowed = make(name)
    model.set_experts_implementation("eager")
    real_BS = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    derived = tolerance(lambda: model(**inputs).logits)[real_BS].max()
    assert derived <= allowed["atol"]
    stock = model(**inputs).logits
    with capacity_aware(model, "score", gamma=0.5, verify=False):
        dropped = (model(**inputs).logits - stock)[real_BS]
    assert dropped.abs().max() > 20 * allowed["atol"]
