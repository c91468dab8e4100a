"""The layers of an engine against loops, on random steps and without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.decision import Scores
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.observers.invariants import examination_seed, is_examined
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, one_group
from torch import Tensor

from capmoe_serve.server.engine import EngineCapacity, StepRows
from server.stand_ins import CPUUnquantizedExperts, E, Experts, K, Layer, Model, Router, Served

METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("order", {}),
    ("reverse_order", {}),
    ("random", {"seed": 3}),
    ("score", {}),
    ("score", {"rounding": "floor"}),
    ("expert_drop", {}),
    ("expanded_drop", {"candidates": "global"}),
    ("expanded_drop", {"candidates": "ranked", "m": 2, "protect_topk": True}),
    ("expanded_drop", {"candidates": "ranked", "m": 2, "max_k": True}),
    ("token_reroute", {"rounds": 2}),
)


@st.composite
def steps(draw: st.DrawFn) -> StepRows:
    """Draw the rows of a step: chunks of prompts, some of one row, and single decoded tokens."""
    scheduled, computed, prompt = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):  # a token that was generated
            prompt.append(draw(st.integers(1, 9)))
            computed.append(prompt[-1] + draw(st.integers(0, 5)))
            scheduled.append(1)
        else:
            scheduled.append(draw(st.sampled_from([1, 1, 2, 5, 9])))
            computed.append(draw(st.integers(0, 6)))
            prompt.append(computed[-1] + scheduled[-1] + draw(st.integers(0, 3)))
    names = tuple(f"request {number}" for number in range(len(scheduled)))
    return StepRows(names, tuple(scheduled), tuple(computed), tuple(prompt))


def under_method(method: Method, rows: StepRows) -> list[bool]:
    """Return by a loop which rows are under the method."""
    is_decode = [
        place >= prompt
        for scheduled, computed, prompt in zip(
            rows.scheduled, rows.computed, rows.prompt, strict=True
        )
        for place in range(computed, computed + scheduled)
    ]
    concerned = {"constrained": (True, False), "only": (True,), "unconstrained": (False,)}
    return [decode in concerned[method.decode] for decode in is_decode]


def expected_pairs(
    method: Method, under: list[bool], logits_NE: Tensor, index_NK: Tensor, layer: int, number: int
) -> list[set[int]]:
    """Return by loops the experts of every row that is a token."""
    rows = [row for row, is_under in enumerate(under) if is_under]
    pairs = [set(index_NK[row].tolist()) for row in range(len(under))]
    if rows:
        scores = Scores(logits_NE[rows].softmax(dim=-1), index_NK[rows].long(), None, None)
        groups = one_group(len(rows))
        counted_BS = torch.ones(1, len(rows), dtype=torch.bool)
        nothing_T = torch.zeros(len(rows), dtype=torch.bool)
        case = Case(scores, groups, counted_BS, method, nothing_T)
        kept = case.reference((layer, number))
        for place, row in enumerate(rows):
            pairs[row] = {expert for token, expert in kept if token == place}
    return pairs


@given(
    rows=steps(),
    chosen=st.sampled_from(METHODS),
    gamma=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    decode=st.sampled_from(["unconstrained", "constrained", "only"]),
    kind=st.sampled_from([CPUUnquantizedExperts, Experts]),
    normalises=st.booleans(),
    n_padding=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=150, deadline=None)
def test_a_layer_computes_the_pairs_that_loops_choose(
    rows: StepRows,
    chosen: tuple[str, dict[str, Any]],
    gamma: float,
    n_padding: int,
    seed: int,
    **knobs: Any,
) -> None:
    name, own_knobs = chosen
    served = Served(name, gamma, draw=seed, **knobs, **own_knobs)
    method, stock = served.method, Router(E, K, normalises=knobs["normalises"])
    under = under_method(method, rows)
    for number in range(2):  # two steps, whose random numbers are others
        first_plan = served.capacity._number
        for place, call in enumerate(served.compute(rows, padding=n_padding)):
            own_weight_NK, own_NK = stock._select_experts(call.hidden_NH, call.logits_NE)
            score_NE = call.logits_NE.softmax(dim=-1)
            if knobs["normalises"]:
                score_NE /= score_NE.gather(1, own_NK.long()).sum(dim=1, keepdim=True)
            pairs = expected_pairs(method, under, call.logits_NE, own_NK, place, first_plan)
            pairs += [set(row) for row in own_NK[rows.n_rows :].tolist()]
            assert call.pairs == pairs, (number, place)
            factors = [
                sum(float(of_E[e]) * (e + 1) for e in of)
                for of_E, of in zip(score_NE, pairs, strict=True)
            ]
            torch.testing.assert_close(
                call.output_NH,
                call.hidden_NH * torch.tensor(factors)[:, None],
                rtol=1e-5,
                atol=1e-6,
            )
            # Bit for bit what the router returned.
            is_free_N = ~torch.tensor([*under, *[False] * n_padding])
            assert torch.equal(call.weight_NS[is_free_N, :K], own_weight_NK[is_free_N])
            assert torch.equal(call.index_NS[is_free_N, :K], own_NK[is_free_N])
    assert served.capacity.report()["summary"]["tokens"] == 2 * sum(under)


@pytest.mark.parametrize(("kind", "is_compact"), [(CPUUnquantizedExperts, True), (Experts, False)])
def test_a_kernel_that_was_tried_computes_the_kept_pairs_alone(
    kind: type[Experts], is_compact: bool
) -> None:
    served = Served("score", 0.5, layers=1, kind=kind)
    served.compute()  # in which the kernel is also proven
    served.experts.pairs = 0
    (call,) = served.compute()
    kept = int((call.weight_NS != 0).sum())
    assert served.experts.pairs == (kept if is_compact else 16 * K)
    assert kept < 16 * K
    assert served.capacity.report()["proofs"]["kernel_agrees"]["passed"]


def test_a_step_without_requests_is_a_warm_up() -> None:
    served = Served("score", 0.5, layers=1)
    hidden_NH, logits_NE = torch.randn(16, 6), torch.randn(16, E)
    stock = Router(E, K)._select_experts(hidden_NH, logits_NE)
    _, *routing = served.layers[0](hidden_NH, logits_NE)
    assert all(torch.equal(*both) for both in zip(routing, stock, strict=True))
    assert served.capacity.report()["summary"]["forwards"] == 0


# What breaks an invariant is done here on purpose.


def replaced_router(served: Served) -> None:
    served.layers[0].router._select_experts = Router(E, K)._select_experts  # type: ignore[method-assign]


def overwritten_decision(served: Served) -> None:
    router, stock = served.layers[0].router, Router(E, K)
    under_capacity = router._select_experts
    router._select_experts = lambda *call: (  # type: ignore[method-assign]
        under_capacity(*call),
        stock._select_experts(*call),
    )[1]


def changed_call(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Served], None]:
    def break_call(served: Served) -> None:
        under_capacity = served.experts.apply
        served.experts.apply = lambda **call: under_capacity(**call | {part: change(call[part])})

    return break_call


def layer_left_out(served: Served) -> None:
    served.layers[1].forward = lambda *_: (None, None, None)  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("kind", [Experts, CPUUnquantizedExperts])
@pytest.mark.parametrize("samples", [False, True])  # also between the steps that are examined
@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (replaced_router, "no MoE layer ran|for 2 layers"),
        (overwritten_decision, "bound_holds"),
        (changed_call("topk_ids", lambda index: index.roll(1, dims=0)), "capacity not enforced"),
        (changed_call("topk_weights", lambda of: of.clamp_min(0.1)), "capacity not enforced"),
        (layer_left_out, "2 calls of routers and experts for 2 layers"),
    ],
)
def test_what_breaks_a_step_is_caught(
    broken: Callable[[Served], None], part: str, kind: type[Experts], samples: bool
) -> None:
    served = Served("score", 0.5, kind=kind, samples=samples)
    for _ in range(10 if broken is overwritten_decision else 1):
        served.compute()  # in the first the kernel is proven
    broken(served)
    with pytest.raises(EnforcementError, match=part):
        served.compute()


def test_a_row_that_is_left_out_is_caught() -> None:
    with pytest.raises(EnforcementError, match="16 rows of 17 tokens"):
        Served("score", 0.5, layers=1).compute(17, padding=-1)


@pytest.mark.parametrize("kind", [Experts, CPUUnquantizedExperts])
def test_a_kernel_that_computes_other_pairs_is_caught(kind: type[Experts]) -> None:
    """A tried one that ignores weights, and another that ignores weights of 0."""

    def apply(self: Experts, *, topk_weights: Tensor, **call: Any) -> None:
        least = 1.0 if kind is CPUUnquantizedExperts else 0.01
        Experts.apply(self, topk_weights=topk_weights.clamp_min(least), **call)

    faulty = type(kind.__name__, (kind,), {"apply": apply})
    with pytest.raises(EnforcementError, match="computes other pairs than the kept"):
        Served("score", 0.5, layers=1, kind=faulty).compute()


STEPS = 70


@pytest.mark.parametrize("samples", [True, False])
def test_every_step_is_checked_against_its_bound(samples: bool) -> None:
    """In a server some checks see the examined steps alone; bounds and drops are in each."""
    served, free = (Served("score", g, layers=1, samples=samples) for g in (0.5, "inf"))
    seen = STEPS
    if samples:
        seed = examination_seed(served.method)
        seen = sum(is_examined(seed, number) for number in range(STEPS))
    for _ in range(STEPS):
        served.compute()
        free.compute()
    report = served.capacity.report()
    assert report["summary"]["tokens"] == STEPS * 16
    for name in ("bound_holds", "pads_take_no_slot", "overload_drops"):
        assert report["proofs"][name]["checked"] == STEPS
    assert report["proofs"]["gate_as_read"]["checked"] == seen
    summary = free.capacity.report()["summary"]  # without a capacity
    assert summary["forwards"] == STEPS
    assert 0 < summary["tokens"] <= STEPS * 16
    assert (summary["tokens"] < STEPS * 16) == samples


def test_the_live_sequences_of_decode_steps_are_requests() -> None:
    served = Served("score", 0.5, decode="constrained")
    for n_requests in (3, 5):
        names = tuple("abcde"[:n_requests])
        served.compute(StepRows(names, (1,) * n_requests, (9,) * n_requests, (8,) * n_requests))
    assert served.capacity.report()["summary"]["decode"]["live"] == 4


def other_gate(layer: Layer, _: Model) -> None:
    compute = layer.router._compute_routing
    layer.router._compute_routing = lambda *call: (  # type: ignore[method-assign]
        compute(*call)[0] ** 1.5,
        compute(*call)[1],
    )


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("by itself", lambda layer, _: vars(layer._quant_method).update(is_monolithic=True)),
        (
            "weighs the input of its experts",
            lambda layer, _: setattr(layer.routed_experts, "apply_router_weight_on_input", True),
        ),
        ("--enable-eplb", lambda layer, _: setattr(layer.router, "eplb_state", object())),
        ("has no Mixture-of-Experts layer", lambda _, model: model.layers.pop(0)),
        ("announces 2 MoE layers, 1 were", lambda _, model: setattr(model, "announced", 2)),
        ("no known gate computes the weights of its router Router", other_gate),
    ],
)
def test_models_that_cannot_be_put_under_a_capacity_are_refused(part: str, change: Any) -> None:
    layer = Layer(Router(E, K), Experts(E))
    model = Model(layer)
    change(layer, model)
    with pytest.raises(UsageError, match=part) as caught:
        EngineCapacity(model, model.config, create_method("score", 0.5))
    assert "\n" not in str(caught.value)
