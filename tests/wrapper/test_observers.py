"""What observers see of a layer's forward, and what they report, against the definition."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capmoe_eval.routing import definition
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.gates import Gate, GateRecipe
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.observers.loads import Loads
from capmoe_eval.wrapper.plan import GAMMA_GRID, ForwardPlan
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make

TOKENS = batch(n_sequences=3, n_positions=6)
MASK = torch.arange(6) < torch.tensor([[6], [4], [5]])


class Log(Observer):
    """Keeps all that it is shown."""

    def __init__(self) -> None:
        self.events: list[LayerForward] = []
        self.forwards: list[tuple[str, int]] = []

    def begin(self, plan: ForwardPlan) -> None:
        self.forwards.append(("begin", plan.number))

    def see(self, event: LayerForward) -> None:
        self.events.append(event)

    def end(self, plan: ForwardPlan) -> None:
        self.forwards.append(("end", plan.number))


class EveryLog(Log):
    every_forward: ClassVar[bool] = True


def test_an_event_has_what_the_experts_were_called_with() -> None:
    model, calls = make("olmoe"), []
    with capacity_aware(model, "score", gamma=0.5) as meter, torch.no_grad():
        log = Log()
        meter.observe(log)
        for layer in meter.layers:
            layer.experts.register_forward_pre_hook(lambda _, call: calls.append(call))
        model(TOKENS, attention_mask=MASK.long())
    assert [(event.number, event.layer) for event in log.events] == list(enumerate(meter.layers))
    assert log.forwards == [("begin", 0), ("end", 0)]
    for event, call in zip(log.events, calls, strict=True):
        seen = event.experts_hidden_NH, event.index_NA, event.weight_NA
        assert all(each is other for each, other in zip(seen, call, strict=True))
        assert event.assignment is not None
        assert event.computed is not None
        rows_TS = event.assignment.index_TS[event.assignment.keep_TS]
        computed = torch.cat([index.flatten() for index in event.computed])
        assert torch.equal(computed, rows_TS)
        assert len(event.scores.topk_TK) == MASK.sum() < len(event.topk_NK)


@pytest.mark.parametrize(
    ("kind", "decode", "seen"),
    [(Log, "unconstrained", {0}), (Log, "only", {1, 2}), (EveryLog, "unconstrained", {0, 1, 2})],
)
def test_an_observer_sees_the_layers_of_the_forwards_that_it_asks_for(
    kind: type[Log], decode: str, seen: set[int]
) -> None:
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5, decode=decode) as meter:
        log = kind()
        meter.observe(log)
        model.generate(TOKENS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert {event.plan.number for event in log.events} == seen
    assert len(log.events) == 2 * len(seen)
    assert log.forwards == [(part, n) for n in range(3) for part in ("begin", "end")]
    for event in log.events:
        assert (event.assignment is None) == (not event.plan.constrained)


def kept_tensors(value: Any) -> int:
    """Return how many tensors an observer keeps, in whatever it is built of."""
    if isinstance(value, Tensor):
        return 1
    parts = getattr(value, "__dict__", value)
    if isinstance(parts, Mapping):
        return sum(map(kept_tensors, parts.values()))
    return sum(map(kept_tensors, parts)) if isinstance(parts, list | tuple) else 0


def test_a_meter_keeps_no_more_after_many_forwards() -> None:
    """A server has millions of them."""
    model, kept = make("olmoe"), []
    with capacity_aware(model, "score", gamma=0.5, decode="constrained") as meter, torch.no_grad():
        for _ in range(3):
            model.generate(TOKENS, max_new_tokens=3, do_sample=False)
            kept.append(sum(map(kept_tensors, meter.observers)))
    assert kept[0] == kept[-1] > 0


# The capacity that was applied over the mean load, against the definition of groups and bounds.


TOP_K = 2
Batches = list[list[int]]  # the numbers of tokens of the sequences of each batch


def metered(method: Method, n_experts: int, batches: Batches) -> dict[str, Any]:
    """The report of a layer that was called with these batches."""
    nothing = torch.nn.Identity()
    gate = Gate(GateRecipe(), nothing)
    layer = MoeLayer("layers.0", nothing, nothing, gate, n_experts, TOP_K)
    loads = Loads([layer], method)
    for number, lengths in enumerate(batches):
        counted_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        n_sequences, n_new = counted_BS.shape
        call = {"n_sequences": n_sequences, "n_new": n_new, "prompt_length": n_new}
        plan = ForwardPlan(method, number=number, counted_BS=counted_BS, decode=False, **call)
        chosen_NK = torch.arange(counted_BS.numel() * TOP_K).view(-1, TOP_K) % n_experts
        hidden_NH, weight_NK = torch.zeros(len(chosen_NK), 1), torch.ones(chosen_NK.shape)
        router = {"logits_NE": torch.zeros(len(chosen_NK), n_experts), "weight_NK": weight_NK}
        event = LayerForward(plan, 0, layer, method, topk_NK=chosen_NK, **router)
        event.experts_ran(hidden_NH, chosen_NK, weight_NK)
        loads.see(event)
    return loads.layer(0)


def by_definition(
    method: Method, n_experts: int, batches: Batches, gamma: float
) -> tuple[float, float]:
    """Return the effective capacity factor and the mean load of buckets that have one."""
    n_units = method.ep_size if method.granularity == "device" else n_experts
    sizes = {"top_k": TOP_K, "n_experts": n_experts}
    capacities = pairs = buckets = 0
    for lengths in batches:
        sequence_T = np.repeat(np.arange(len(lengths)), lengths)
        group_T, _ = definition.capacity_groups(
            sequence_T, len(lengths), ep_size=method.ep_size, scope=method.scope
        )
        tokens_G = np.bincount(group_T)
        capacities += n_units * sum(definition.limits(method, gamma, tokens_G, **sizes))
        pairs += TOP_K * len(sequence_T)
        buckets += n_units * np.count_nonzero(tokens_G)
    return capacities / pairs, pairs / buckets


@settings(deadline=None)
@given(
    gamma=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.1, 1.5, 3.0, 9.0]),
    ep_size=st.sampled_from([1, 2, 4]),
    local=st.integers(1, 4),
    scope=st.sampled_from(["batch", "sequence"]),
    granularity=st.sampled_from(["expert", "device"]),
    rounding=st.sampled_from(["ceil", "floor"]),
    batches=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), min_size=1, max_size=3
    ),
)
def test_it_is_the_sum_of_capacities_over_the_sum_of_mean_loads(
    gamma: float, ep_size: int, local: int, batches: Batches, **knobs: str
) -> None:
    n_experts = max(ep_size * local, TOP_K)
    method = create_method("score", gamma, ep_size=ep_size, **knobs)
    report = metered(method, n_experts, batches)
    for at, effective in zip(GAMMA_GRID, report["grid"]["effective_gamma"], strict=True):
        expected, _ = by_definition(method, n_experts, batches, at)
        assert effective == pytest.approx(expected, abs=1e-6)  # six decimals are recorded
    effective_gamma = report["effective_gamma"]
    if method.is_stock:  # a bound of devices that cannot bind is the baseline
        assert effective_gamma is None
        return
    assert method.factor is not None
    assert method.factor.uniform == gamma
    expected = by_definition(method, n_experts, batches, gamma)
    assert (effective_gamma, report["mean_load"]) == pytest.approx(expected)
    # With many tokens per bucket it is γ: rounding moves a capacity by less than one token. A
    # bucket holds no more than all tokens of its group, E/K mean loads.
    nominal = min(gamma, n_experts / TOP_K)
    if method.rounding == "ceil":
        assert nominal - 1e-9 <= effective_gamma < nominal + 1 / report["mean_load"]
    else:
        assert nominal - 1 / report["mean_load"] < effective_gamma <= nominal + 1e-9
