"""The layers of an engine against loops, on random steps and without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Scores
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.problems import Case, one_group
from tests.routing.reference import assign_reference
from torch import Tensor

from capmoe_serve.server.engine import EngineCapacity
from capmoe_serve.server.step import StepRows, plan_step
from server.stand_ins import (
    HIDDEN,
    CPUUnquantizedExperts,
    Experts,
    Layer,
    Model,
    Router,
    runner_of,
)

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
DECODE = ("unconstrained", "constrained", "only")


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
    under = []
    for scheduled, computed, prompt in zip(rows.scheduled, rows.computed, rows.prompt, strict=True):
        for place in range(computed, computed + scheduled):
            is_decode = place >= prompt
            under.append(
                {"constrained": True, "only": is_decode, "unconstrained": not is_decode}[
                    method.decode
                ]
            )
    return under


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
        kept = assign_reference(case.problem((layer, number)), method)
        for place, row in enumerate(rows):
            pairs[row] = {expert for token, expert in kept if token == place}
    return pairs


@given(
    rows=steps(),
    chosen=st.sampled_from(METHODS),
    gamma=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    decode=st.sampled_from(DECODE),
    compacts=st.booleans(),
    normalises=st.booleans(),
    n_padding=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=150, deadline=None)
def test_a_layer_computes_the_pairs_that_loops_choose(
    rows: StepRows,
    chosen: tuple[str, dict[str, Any]],
    gamma: float,
    decode: str,
    compacts: bool,
    normalises: bool,
    n_padding: int,
    seed: int,
) -> None:
    name, knobs = chosen
    method = create_method(name, gamma, decode=decode, **knobs)
    n_experts, top_k, n_rows = 7, 3, rows.n_rows
    kind = CPUUnquantizedExperts if compacts else Experts
    layers = [
        Layer(Router(n_experts, top_k, normalises=normalises), kind(n_experts)) for _ in range(2)
    ]
    model = Model(*layers)
    stock_router = Router(n_experts, top_k, normalises=normalises)
    capacity = EngineCapacity(model, model.config, method)
    generator = torch.Generator().manual_seed(seed)
    for number in range(2):  # two steps, whose random numbers are others
        first_plan = capacity._number
        capacity.begin(*runner_of(rows))
        under = under_method(method, rows)
        for place, layer in enumerate(layers):
            hidden_NH = torch.randn(n_rows + n_padding, HIDDEN, generator=generator)
            logits_NE = torch.randn(n_rows + n_padding, n_experts, generator=generator)
            logits_NE[:, 0] += 2  # which overloads an expert
            own_weight_NK, own_NK = stock_router._select_experts(hidden_NH, logits_NE)
            output_NH, weight_NS, index_NS = layer(hidden_NH, logits_NE)

            score_NE = logits_NE.softmax(dim=-1)
            total_N1 = score_NE.gather(1, own_NK.long()).sum(dim=1, keepdim=True)
            of_NE = score_NE / total_N1 if normalises else score_NE
            pairs = expected_pairs(method, under, logits_NE, own_NK, place, first_plan)
            pairs += [set(own_NK[row].tolist()) for row in range(n_rows, n_rows + n_padding)]
            for row, experts in enumerate(pairs):
                slots = {
                    int(expert): float(weight)
                    for expert, weight in zip(index_NS[row], weight_NS[row], strict=True)
                    if weight != 0
                }
                assert set(slots) == experts, (number, place, row)
                expected = sum(float(of_NE[row, expert]) * (expert + 1) for expert in experts)
                torch.testing.assert_close(
                    output_NH[row], hidden_NH[row] * expected, rtol=1e-5, atol=1e-6
                )
                if row >= n_rows or not under[row]:  # bit for bit what the router returned
                    assert torch.equal(weight_NS[row, :top_k], own_weight_NK[row])
                    assert torch.equal(index_NS[row, :top_k], own_NK[row])
        capacity.end()
    summary = capacity.report()["summary"]
    assert summary["tokens"] == 2 * sum(under)


def chunk(*scheduled: int) -> StepRows:
    """Return the rows of whole prompts."""
    names = tuple(map(str, range(len(scheduled))))
    return StepRows(names, scheduled, (0,) * len(scheduled), scheduled)


def one_layer(
    method: Method, experts: type[Experts] = CPUUnquantizedExperts
) -> tuple[EngineCapacity, Layer]:
    layer = Layer(Router(7, 3), experts(7))
    model = Model(layer)
    return EngineCapacity(model, model.config, method), layer


def random_step(n_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_NE = torch.randn(n_rows, 7, generator=generator)
    logits_NE[:, 0] += 2
    return torch.randn(n_rows, HIDDEN, generator=generator), logits_NE


def step(layer: Layer, capacity: EngineCapacity) -> Tensor:
    """Compute a step of a prompt of 16 tokens; return the weights at the experts."""
    capacity.begin(*runner_of(chunk(16)))
    _, weight_NK, _ = layer(*random_step(16))
    capacity.end()
    return weight_NK


def test_the_kernel_computes_the_kept_pairs_alone() -> None:
    method = create_method("score", 0.5)
    capacity, layer = one_layer(method)
    step(layer, capacity)  # in which the kernel is also proven
    experts = layer._quant_method.moe_kernel.fused_experts
    experts.pairs = 0
    weight_NK = step(layer, capacity)
    assert experts.pairs == int((weight_NK != 0).sum()) < 16 * 3
    assert capacity.report()["proofs"]["kernel_agrees"]["passed"]


def test_a_kernel_that_was_not_tried_gets_every_slot() -> None:
    capacity, layer = one_layer(create_method("score", 0.5), Experts)
    step(layer, capacity)  # in which the kernel is also proven
    experts = layer._quant_method.moe_kernel.fused_experts
    experts.pairs = 0
    weight_NK = step(layer, capacity)
    assert experts.pairs == 16 * 3
    assert 2 * int((weight_NK == 0).sum()) == capacity.report()["summary"]["dropped"] > 0


def test_a_step_without_requests_is_a_warm_up() -> None:
    capacity, layer = one_layer(create_method("score", 0.5))
    hidden_NH, logits_NE = random_step(16)
    stock = Router(7, 3)._select_experts(hidden_NH, logits_NE)
    _, weight_NK, index_NK = layer(hidden_NH, logits_NE)
    assert torch.equal(weight_NK, stock[0])
    assert torch.equal(index_NK, stock[1])
    assert capacity.report()["summary"]["forwards"] == 0


def test_another_method_may_take_the_place_of_one() -> None:
    capacity, layer = one_layer(create_method("score", 0.5))
    capacity.remove()
    model = Model(layer)
    other = EngineCapacity(model, model.config, create_method("score", 1.5))
    for of in (capacity, other):
        of.begin(*runner_of(chunk(16)))
    layer(*random_step(16))
    other.end()
    capacity.end()
    assert other.report()["summary"]["tokens"] == 16
    assert capacity.report()["summary"]["tokens"] == 0


# What breaks an invariant is done here on purpose.


@pytest.mark.parametrize("experts", [Experts, CPUUnquantizedExperts])
def test_a_router_that_is_replaced_later_is_caught(experts: type[Experts]) -> None:
    capacity, layer = one_layer(create_method("score", 0.5), experts)
    stock = Router(7, 3)
    layer.router._select_experts = stock._select_experts  # type: ignore[method-assign]
    with pytest.raises(EnforcementError, match="no MoE layer ran"):
        step(layer, capacity)


@pytest.mark.parametrize("experts", [Experts, CPUUnquantizedExperts])
def test_a_router_whose_decision_is_overwritten_is_caught(experts: type[Experts]) -> None:
    capacity, layer = one_layer(create_method("score", 0.5), experts)
    step(layer, capacity)  # the kernel is proven
    under_capacity, stock = layer.router._select_experts, Router(7, 3)

    def overwritten(hidden_NH: Tensor, logits_NE: Tensor) -> Any:
        under_capacity(hidden_NH, logits_NE)
        return stock._select_experts(hidden_NH, logits_NE)

    layer.router._select_experts = overwritten  # type: ignore[method-assign]
    with pytest.raises(EnforcementError, match="capacity not enforced"):
        step(layer, capacity)


@pytest.mark.parametrize("experts", [Experts, CPUUnquantizedExperts])
@pytest.mark.parametrize("part", ["topk_ids", "topk_weights"])
def test_a_change_between_router_and_experts_is_caught(experts: type[Experts], part: str) -> None:
    capacity, layer = one_layer(create_method("score", 0.5), experts)
    step(layer, capacity)  # the kernel is proven
    kernel: Any = layer._quant_method.moe_kernel.fused_experts
    under_capacity = kernel.apply

    def changed(**call: Any) -> Any:
        value = call[part]
        other = value.roll(1, dims=0) if part == "topk_ids" else value.clamp_min(0.1)
        return under_capacity(**call | {part: other})

    kernel.apply = changed
    with pytest.raises(EnforcementError, match="capacity not enforced"):
        step(layer, capacity)


def test_a_kernel_that_ignores_weights_is_caught() -> None:
    class CPUUnquantizedExperts(Experts):
        def apply(self, *, topk_weights: Tensor, **call: Any) -> None:
            super().apply(topk_weights=torch.ones_like(topk_weights), **call)

    capacity, layer = one_layer(create_method("score", 0.5), CPUUnquantizedExperts)
    with pytest.raises(EnforcementError, match="computes other pairs than the kept"):
        step(layer, capacity)


def test_an_untried_kernel_that_ignores_weights_of_0_is_caught() -> None:
    class OtherExperts(Experts):
        def apply(self, *, topk_weights: Tensor, **call: Any) -> None:
            super().apply(topk_weights=topk_weights.clamp_min(0.01), **call)

    capacity, layer = one_layer(create_method("score", 0.5), OtherExperts)
    with pytest.raises(EnforcementError, match="computes other pairs than the kept"):
        step(layer, capacity)


def test_a_layer_that_is_left_out_is_caught() -> None:
    layers = [Layer(Router(7, 3), Experts(7)) for _ in range(2)]
    model = Model(*layers)
    capacity = EngineCapacity(model, model.config, create_method("score", 0.5))
    capacity.begin(*runner_of(chunk(16)))
    layers[0](*random_step(16))
    with pytest.raises(EnforcementError, match="2 calls of routers and experts for 2 layers"):
        capacity.end()


def test_a_step_that_no_layer_sees_is_caught() -> None:
    capacity, _ = one_layer(create_method("score", 0.5))
    capacity.begin(*runner_of(chunk(16)))
    with pytest.raises(EnforcementError, match="no MoE layer ran"):
        capacity.end()


def test_fewer_rows_than_tokens_are_caught() -> None:
    capacity, layer = one_layer(create_method("score", 0.5))
    capacity.begin(*runner_of(chunk(17)))
    with pytest.raises(EnforcementError, match="16 rows of 17 tokens"):
        layer(*random_step(16))


def test_models_that_cannot_be_put_under_a_capacity_are_refused() -> None:
    method = create_method("score", 0.5)

    def refusal(change: Any) -> str:
        layer = Layer(Router(7, 3), Experts(7))
        model = Model(layer)
        config = change(layer, model) or model.config
        with pytest.raises(UsageError) as caught:
            EngineCapacity(model, config, method)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def monolithic(layer: Layer, _: Model) -> None:
        layer._quant_method.is_monolithic = True

    def weighs_inputs(layer: Layer, _: Model) -> None:
        layer.routed_experts.apply_router_weight_on_input = True

    def balanced(layer: Layer, _: Model) -> None:
        layer.router.eplb_state = object()  # type: ignore[assignment]

    def dense(_: Layer, model: Model) -> None:
        del model.layers[0]

    def two_layers(_: Layer, model: Model) -> Any:
        return Model(*model.layers, *model.layers).config

    def other_gate(layer: Layer, _: Model) -> None:
        router, compute = layer.router, layer.router._compute_routing
        router._compute_routing = lambda *call: (  # type: ignore[method-assign]
            compute(*call)[0] ** 1.5,
            compute(*call)[1],
        )

    assert "chooses the experts by itself" in refusal(monolithic)
    assert "weighs the input of its experts" in refusal(weighs_inputs)
    assert "--enable-eplb" in refusal(balanced)
    assert "has no Mixture-of-Experts layer" in refusal(dense)
    assert "announces 2 MoE layers, 1 were found" in refusal(two_layers)
    assert "no known gate computes the weights of its router Router" in refusal(other_gate)


# Steps.


def test_a_row_is_of_a_prompt_if_its_position_is() -> None:
    # A decoded token, the last row of a prompt, a chunk, and a step over the prompt's end.
    rows = StepRows(("a", "b", "c", "d"), (1, 1, 3, 3), (8, 5, 2, 4), (8, 6, 20, 6))
    assert rows.decode_N.tolist() == [True, False, False, False, False, False, False, True]
    assert rows.request_N.tolist() == [0, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("decode", "rows"),
    [("unconstrained", [[1, 2], [0]]), ("constrained", [[0, 1, 2]]), ("only", [[0], [1, 2]])],
)
def test_a_step_has_a_plan_of_each_kind_of_rows(decode: str, rows: list[list[int]]) -> None:
    step = StepRows(("a", "b"), (1, 2), (8, 0), (8, 2))
    plans = plan_step(create_method("score", 1.0, decode=decode), 5, step)
    assert [plan.rows_T.tolist() for plan in plans] == rows
    assert [plan.number for plan in plans] == [5, 6][: len(rows)]
    assert [plan.constrained for plan in plans] == [True, False][: len(rows)]
    assert [plan.groups.n_tokens for plan in plans] == [len(of) for of in rows]
