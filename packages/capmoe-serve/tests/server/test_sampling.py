"""In a server some checks see the examined steps alone; bounds and drops are checked in each."""

from __future__ import annotations

import pytest
from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.observers.invariants import examination_seed, is_examined

from capmoe_serve.server.engine import EngineCapacity
from server.stand_ins import Layer, Model, Router
from server.test_layers import CPUUnquantizedExperts, step

STEPS = 70


def examined(method: Method) -> int:
    return sum(is_examined(examination_seed(method), number) for number in range(STEPS))


def server(gamma: float | str, *, samples: bool) -> tuple[EngineCapacity, Layer]:
    layer = Layer(Router(7, 3), CPUUnquantizedExperts(7))
    model = Model(layer)
    method = create_method("score", gamma)
    return EngineCapacity(model, model.config, method, samples=samples), layer


@pytest.mark.parametrize("samples", [True, False])
def test_every_step_is_checked_against_its_bound(samples: bool) -> None:
    capacity, layer = server(0.5, samples=samples)
    for _ in range(STEPS):
        step(layer, capacity)
    report = capacity.report()
    assert report["summary"]["tokens"] == STEPS * 16
    for name in ("bound_holds", "pads_take_no_slot", "overload_drops"):
        assert report["proofs"][name]["checked"] == STEPS
    assert report["proofs"]["gate_as_read"]["checked"] == (
        examined(capacity.method) if samples else STEPS
    )


@pytest.mark.parametrize("samples", [True, False])
def test_without_a_capacity_only_examined_steps_are_counted(samples: bool) -> None:
    capacity, layer = server("inf", samples=samples)
    for _ in range(STEPS):
        step(layer, capacity)
    report = capacity.report()
    assert report["summary"]["forwards"] == STEPS
    seen = examined(capacity.method) if samples else STEPS
    assert report["summary"]["tokens"] == seen * 16


def test_a_pair_that_is_computed_in_spite_of_its_bound_is_caught_between_examined_steps() -> None:
    capacity, layer = server(0.5, samples=True)
    for _ in range(10):
        step(layer, capacity)
    stock, under = Router(7, 3), layer.router._select_experts

    def overwritten(*arguments: object) -> object:
        under(*arguments)
        return stock._select_experts(*arguments)  # type: ignore[arg-type]

    layer.router._select_experts = overwritten  # type: ignore[method-assign]
    with pytest.raises(EnforcementError, match="bound_holds"):
        step(layer, capacity)
