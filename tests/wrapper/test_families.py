"""Every family: equal to stock where it must be, changed where it must, by more than rounding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import (
    EVERY,
    PAPER_FAMILIES,
    batch,
    logits,
    make,
    similarities,
)

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(pytest.param(*param.values, "score", marks=param.marks) for param in EVERY),
        *(("olmoe", method) for method in ("baseline", "order", "random", "token_reroute")),
        # Their decisions read groups and biases of the router.
        *((name, "token_reroute") for name in ("deepseek_v2_groups", "deepseek_v3")),
    ],
)
def test_without_a_binding_capacity_the_logits_are_the_stock_models(name: str, method: str) -> None:
    model = make(name)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1, 7:] = 0
    for gamma, call in itertools.product((math.inf, 100.0), ({}, {"attention_mask": mask})):
        before = logits(model, **call)
        under = create_method(method, gamma)
        with capacity_aware(model, under, verify=gamma == math.inf) as meter:
            assert torch.equal(before, logits(model, **call)), "of pads, too"
        assert meter.summary()["dropped"] == 0
        is_proven = True if gamma == math.inf else None
        assert meter.proofs()["stock_at_infinity"]["passed"] is is_proven


# Those of MACS and LASER, which need other inputs, are in packages/capmoe-methods.
APART = ("baseline", "macs", "laser")


@pytest.mark.parametrize("method", [name for name in method_names() if name not in APART])
@pytest.mark.parametrize("name", PAPER_FAMILIES)
def test_every_method_changes_the_logits_and_restores_the_model(name: str, method: str) -> None:
    """The test that fails if the intervention does nothing."""
    model, tokens = make(name), batch()
    if method in ("oea", "xshare", "sere"):  # more tokens activate every expert of so small a model
        tokens = tokens[:1, :2]
    before = logits(model, tokens)
    knobs: dict[str, Any] = {"calibrated": similarities(model)} if method == "sere" else {}
    under = create_method(method, 0.5, expert_budget=0.25)
    with capacity_aware(model, under, **knobs) as meter:
        assert not torch.allclose(before, logits(model, tokens), atol=1e-3)
    assert meter.summary()["dropped"] > 0
    # The k0 best of two tokens may exceed the budget; under Expert Drop no load has a bound, and
    # only capacities of pairs are filled.
    open_proofs = {
        "best_kept",
        "slots_filled",
        *(["overload_drops"] if method == "expert_drop" else []),
    }
    failed = {name for name, proof in meter.proofs().items() if not proof["passed"]}
    assert failed <= open_proofs
    assert torch.equal(before, logits(model, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_half_precision_works(name: str, dtype: torch.dtype) -> None:
    model = make(name)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "router" in part or part.endswith("gate.weight"):
                parameter.mul_(0.3)  # no weight too small for half precision
    model.to(dtype)
    before = logits(model)
    for implementation in ("batched_mm", "eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with capacity_aware(model, "expanded_drop", gamma=1.0, ep_size=2) as meter:
            inside = logits(model)
        proof = meter.proofs()["kernel_agrees"]
        assert proof["deviation"] <= proof["tolerance"] == KERNEL_TOLERANCE[dtype]
        assert inside.dtype == dtype
        assert bool(inside.isfinite().all())
        assert not torch.equal(before, inside)
    assert meter.summary()["added"] > 0
