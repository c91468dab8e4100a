"""Which forwards are compared with the definition, and what a record says of it."""

from __future__ import annotations

import pytest
import torch

from capmoe_eval.wrapper.observers.invariants import (
    EVERY,
    FIRST,
    examination_seed,
    is_examined,
)
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make


def test_layers_are_examined_by_chance_and_in_the_first_forwards_all() -> None:
    runs = [[[is_examined(seed, n, of) for of in range(8)] for n in range(1000)] for seed in (1, 2)]
    for run in runs:
        assert all(map(all, run[:3]))
        expected = sum(min(1.0, FIRST / max(n, 1) + 1 / EVERY) for n in range(1000))
        assert sum(map(sum, run)) / 8 == pytest.approx(expected, rel=0.15)
    assert runs[0] != runs[1]


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
    seed = examination_seed(meter.method)
    layers = [sum(is_examined(seed, n, layer) for layer in range(2)) for n in range(10)]
    examined = {
        "forwards": sum(map(bool, layers)),
        "of": 10,
        "layers": sum(layers),
        "buckets": sum(layers) * 2 * n_experts,
        "seed": seed,
    }
    names = ("pairs_as_defined", "weights_as_defined", "pairs_valid", "scores_as_defined")
    for name in (*names, "outputs_as_defined"):
        assert meter.proofs()[name] == {"passed": True, "violations": 0, "examined": examined}
    for name in ("groups_as_defined", "slots_filled"):
        assert meter.proofs()[name]["passed"]
