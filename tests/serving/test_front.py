"""Settings on a trace are what loops count, on the steps that nothing was planned on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.serving.front import (
    Setting,
    capacity_sums,
    cost,
    judged_part,
    speedup,
    trace_settings,
    with_front,
)
from capmoe_eval.serving.reference import count_step
from capmoe_eval.serving.score_mass import KEEPERS
from capmoe_eval.serving.trace import Trace
from tests.serving.test_summary import traces

GAMMAS = (0.4, 1.0, 1.1, 3.0)


@settings(max_examples=40, deadline=None)
@given(traces(), st.booleans())
def test_capacities_are_what_loops_count(trace: Trace, of_devices: bool) -> None:
    ranks = trace.ranks or 1
    size = trace.n_experts // ranks if of_devices else 1
    assert trace.expert_TLK is not None and trace.score_TLK is not None and trace.step_T is not None
    for gamma, found in zip(GAMMAS, capacity_sums(trace, GAMMAS, ranks, size), strict=True):
        counts = [
            count_step(
                trace.expert_TLK[trace.step_T == step, layer].tolist(),
                trace.score_TLK[trace.step_T == step, layer].tolist(),
                gamma=gamma,
                n_experts=trace.n_experts,
                ranks=ranks,
                size=size,
            )
            for step in np.unique(trace.step_T)
            for layer in range(trace.n_layers)
        ]
        asked, dropped = trace.expert_TLK.size, sum(count.dropped for count in counts)
        slots = sum(count.slots for count in counts)
        assert found.drop_rate == pytest.approx(dropped / asked)
        assert found.pad_waste == pytest.approx(1 - (asked - dropped) / slots)
        fullest = sum(count.fullest_after for count in counts)
        assert found.straggler == pytest.approx(fullest * ranks / asked)
        mass = float(trace.score_TLK.sum()) or 1.0
        assert found.dropped_score == pytest.approx(
            {name: sum(count.dropped_score[name] for count in counts) / mass for name in KEEPERS}
        )


def skewed(steps: int = 6, experts: int = 8, seed: int = 0) -> Trace:
    """A trace of counts in which expert 0 gets most."""
    generator = np.random.default_rng(seed)
    load = generator.integers(5, 15, (steps, 2, experts))
    load[:, :, 0] += 60
    return Trace(experts, load_SLE=load, model="made", source="made")


def test_the_second_half_is_judged_and_the_first_is_planned_on() -> None:
    trace = skewed()
    assert trace.load_SLE is not None
    # The first half likes another expert: no capacity sees it, and every plan does.
    other = trace.load_SLE.copy()
    other[:3] = np.roll(other[:3], 5, axis=2)
    changed = dataclasses.replace(trace, load_SLE=other)
    before, after = (trace_settings(each, GAMMAS, 4, 3) for each in (trace, changed))
    same = {
        old.title: old == new
        for old, new in zip(before, after, strict=True)
        if old.kind != "transfers"
    }
    assert not same.pop("EPLB+4") and not same.pop("LPLB+4")
    same.pop("EPLB")
    assert all(same.values())
    plan = next(setting for setting in before if setting.title == "EPLB+4")
    assert plan.speedup > 1.3 and plan.drop_rate == 0.0 and plan.extra == 4


def test_tokens_are_halved_as_their_loads_are() -> None:
    generator = np.random.default_rng(1)
    ids = np.argsort(generator.random((30, 2, 6)), axis=2)[:, :, :2].astype(np.uint8)
    trace = Trace(6, expert_TLK=ids, step_T=np.sort(generator.integers(0, 5, 30)))
    assert (judged_part(trace).loads() == trace.loads()[2:]).all()
    assert judged_part(trace.in_steps(30)) is not None and trace.in_steps(30).n_steps == 1
    only = trace_settings(trace.in_steps(30), (1.0,), 2, 4)
    assert [setting.kind for setting in only[:3]] == ["unchanged", "transfers", "capacity"]


def test_a_capacity_that_drops_nothing_changes_nothing_and_a_small_one_does() -> None:
    found = trace_settings(skewed(), (0.5, 8.0), 4, 3)
    unchanged = found[0]
    wide = [setting for setting in found if setting.gamma == 8.0]
    small = [setting for setting in found if setting.gamma == 0.5]
    assert all(s.straggler == pytest.approx(unchanged.straggler) for s in wide)
    assert all(s.speedup == pytest.approx(1.0) and s.drop_rate == 0.0 for s in wide)
    assert all(s.speedup > 1.5 and s.drop_rate > 0.3 for s in small)
    assert all(s.dropped_score is None for s in found)  # counts have no scores


@pytest.mark.parametrize(
    ("straggler", "drop_rate", "link_share", "expected"),
    [
        (1.0, 0.5, 0.0, 2.0),  # compute alone: the fullest rank
        (1.0, 0.5, 1.0, 2.0),  # the link alone: the pairs
        (1.0, 0.0, 1.0, 1.0),  # which balancing does not lower
        (1.0, 0.2, 0.5, 1 / (0.25 + 0.4)),
    ],
)
def test_the_speedup_has_a_part_of_the_fullest_rank_and_one_of_the_link(
    straggler: float, drop_rate: float, link_share: float, expected: float
) -> None:
    assert speedup(straggler, 2.0, drop_rate, link_share) == pytest.approx(expected)


@st.composite
def many_settings(draw: st.DrawFn) -> list[Setting]:
    """Draw settings whose speedups and costs are often equal."""
    few = st.integers(0, 4)
    return [
        Setting(
            kind=draw(st.sampled_from(("unchanged", "placement", "transfers", "capacity"))),
            method=f"m{number}",
            gamma=1.0,
            granularity="expert",
            straggler=1.0,
            speedup=1 + draw(few) / 4,
            drop_rate=draw(few) / 4,
        )
        for number in range(draw(st.integers(1, 8)))
    ]


@settings(max_examples=100, deadline=None)
@given(many_settings())
def test_the_front_is_what_no_other_beats(found: list[Setting]) -> None:
    def beats(one: Setting, other: Setting) -> bool:
        cheaper = cost(one, "pairs") or 0.0, cost(other, "pairs") or 0.0
        at_least = one.speedup >= other.speedup and cheaper[0] <= cheaper[1]
        return at_least and (one.speedup > other.speedup or cheaper[0] < cheaper[1])

    charged = [setting for setting in found if setting.kind != "transfers"]
    for setting in with_front(found, "pairs"):
        own = setting.model_copy(update={"is_on_front": False})
        beaten = setting.kind == "transfers" or any(beats(other, own) for other in charged)
        assert setting.is_on_front is not beaten


def test_deployments_that_cannot_be() -> None:
    from capmoe_eval.serving.front import check_deployment

    for ranks, slots, said in ((1, 8, "ranks=1"), (3, 4, "ranks=3: 8 experts"), (4, 1, "at least")):
        with pytest.raises(UsageError, match=said):
            check_deployment(8, ranks, slots)
    assert math.isfinite(speedup(0.0, 2.0, 1.0, 0.0))
