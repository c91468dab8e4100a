"""One immutable event a layer: who sees it, what it has, and what an observer adds to a report."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.observers import CountingObserver, Observer, PeakSums, Proof, Tally
from capmoe_eval.wrapper.plan import ForwardPlan
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


def test_an_event_has_what_the_experts_were_called_with_and_cannot_be_changed() -> None:
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
        seen = event.experts.hidden_NH, event.experts.index_NA, event.experts.weight_NA
        assert all(each is other for each, other in zip(seen, call, strict=True))
        assert event.assignment is not None
        assert event.computed is not None
        rows_TS = event.assignment.index_TS[event.assignment.keep_TS]
        computed = torch.cat([index.flatten() for index in event.computed])
        assert torch.equal(computed, rows_TS)
        assert len(event.scores.topk_TK) == MASK.sum() < len(event.router.topk_NK)
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.number = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "decode", "seen"),
    [
        (Log, "unconstrained", {0}),
        (Log, "only", {1, 2}),
        (Log, "constrained", {0, 1, 2}),
        (EveryLog, "unconstrained", {0, 1, 2}),
    ],
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


class Banned(CountingObserver):
    """Counts the pairs of one expert, which a method of one's own never calls."""

    faults: ClassVar[Mapping[str, str]] = {"violations": "bound_holds ({} calls of expert 0)"}

    def see(self, event: LayerForward) -> None:
        self.sums[event.number].add(violations=event.counts.kept_E[0], seen=1)

    def layer(self, number: int) -> dict[str, Any]:
        return {"seen": self.sums[number].count("seen")}

    def summary(self) -> dict[str, Any]:
        return {"seen": self.count("seen")}

    def proofs(self, tally: Tally) -> dict[str, Proof]:
        return {"never_called": tally.proof({"violations": self.count("violations")})}


@dataclass(frozen=True, kw_only=True)
class Mine(TokenDrop):
    """A method with an observer of its own."""

    name: ClassVar[str] = "mine"

    def observers(self, layers: Sequence[Any], calibrated: Any) -> Sequence[Any]:
        return [Banned(len(layers))]


def test_a_method_brings_observers_of_its_own() -> None:
    model = make("olmoe")
    broken_bound = pytest.raises(EnforcementError, match=r"layers\.0\.mlp: bound_holds \(\d+ calls")
    with capacity_aware(model, Mine(gamma=0.5), verify=False) as meter, broken_bound:
        model(TOKENS)
    report = meter.report()
    assert report["summary"]["seen"] == 2
    for layer in report["layers"]:
        assert layer["seen"] == 1
        assert layer["violations"] == layer["load_after"][0]
    broken = sum(layer["violations"] for layer in report["layers"])
    for name in ("bound_holds", "never_called"):
        assert report["proofs"][name]["violations"] == broken > 0


PEAKS = st.floats(0, 64, width=32) | st.just(math.nan)


@given(st.lists(st.tuples(PEAKS, PEAKS), min_size=1))
def test_running_peaks_are_those_of_all_forwards_together(rows: list[tuple[float, float]]) -> None:
    peaks = PeakSums.of(torch.tensor(rows[0]))
    for row in rows[1:]:
        peaks = peaks.then(torch.tensor(row))
    for place, column in enumerate(zip(*rows, strict=True)):
        values = [peak for peak in column if not math.isnan(peak)]
        expected = values and {
            "mean": round(statistics.fmean(values), 6),
            "max": round(max(values), 6),
            "last": round(values[-1], 6),
        }
        assert peaks.figures(place) == (expected or None)


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
