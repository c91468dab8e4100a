"""The front has what no other beats, of settings on the steps that nothing was planned on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.advising import check_deployment, trace_settings
from capmoe_serve.settings import ServingSetting, cost, speedup, with_front
from capmoe_serve.trace import Trace

GAMMAS = (0.4, 1.0, 1.1, 3.0)


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
    changed_by_plan = {
        title
        for title in {one.title for one in (*before, *after)}
        if [s for s in before if s.title == title] != [s for s in after if s.title == title]
    }
    assert {"EPLB+4", "LPLB+4", "score γ=1 per device on EPLB+4"} <= changed_by_plan
    unplanned = {one.title for one in before if one.placement is None and one.matched is None}
    assert changed_by_plan & unplanned <= {"EPLB", "EPLB+4", "LPLB+4"}
    plan = next(setting for setting in before if setting.title == "EPLB+4")
    assert plan.speedup > 1.3
    assert plan.drop_rate == 0.0
    assert plan.extra == 4


def test_tokens_are_halved_as_their_loads_are() -> None:
    generator = np.random.default_rng(1)
    ids = np.argsort(generator.random((30, 2, 6)), axis=2)[:, :, :2].astype(np.uint8)
    trace = Trace(6, expert_TLK=ids, step_T=np.sort(generator.integers(0, 5, 30)))
    assert (trace.second_half().loads() == trace.loads()[2:]).all()
    whole = trace.in_steps(30)
    assert whole.second_half() is whole
    assert whole.n_steps == 1
    only = trace_settings(whole, (1.0,), 2, 4)
    kinds = [setting.kind for setting in only]
    assert kinds == ["unchanged", "transfers", *["capacity"] * 6, "activation"]
    assert all(one.placement is None and one.layer_gammas is None for one in only)


def test_a_capacity_that_drops_nothing_changes_nothing_and_a_small_one_does() -> None:
    found = trace_settings(skewed(), (0.5, 8.0), 4, 3)
    unchanged = found[0]
    wide = [one for one in found if one.gamma == 8.0 and one.placement is None]
    small = [setting for setting in found if setting.gamma == 0.5]
    assert all(s.straggler == pytest.approx(unchanged.straggler) for s in wide)
    assert all(s.speedup == pytest.approx(1.0) and s.drop_rate == 0.0 for s in wide)
    assert all(s.reached > 1.5 and s.drop_rate > 0.3 for s in small)
    assert all(s.dropped_score is None for s in found)  # counts have no scores
    # On a placement a wide one is that placement, and it drops nothing.
    placed = {one.title: one for one in found if one.kind == "placement"}
    of_devices = [one for one in found if one.gamma == 8.0 and one.granularity == "device"]
    for one in of_devices[-2:]:
        assert one.placement in ("EPLB", "EPLB+4")
        assert one.drop_rate == 0.0
        assert one.straggler == pytest.approx(placed[one.placement].straggler)
        assert (one.extra, one.set_up) == (
            placed[one.placement].extra,
            placed[one.placement].set_up,
        )


@pytest.mark.parametrize(
    ("straggler", "sent", "link_share", "expected"),
    [
        (1.0, 0.5, 0.0, 2.0),  # compute alone: the fullest rank
        (1.0, 0.5, 1.0, 2.0),  # the link alone: the pairs
        (1.0, 1.0, 1.0, 1.0),  # which balancing does not lower
        (1.0, 0.8, 0.5, 1 / (0.25 + 0.4)),
    ],
)
def test_the_speedup_has_a_part_of_the_fullest_rank_and_one_of_the_link(
    straggler: float, sent: float, link_share: float, expected: float
) -> None:
    assert speedup(straggler, 2.0, sent, link_share) == pytest.approx(expected)


@st.composite
def many_settings(draw: st.DrawFn) -> list[ServingSetting]:
    """Draw settings whose speedups and costs are often equal."""
    few = st.integers(0, 4)
    kinds = st.sampled_from(("placement", "transfers", "capacity", "capacity", "activation"))
    home = ServingSetting(kind="unchanged", method="contiguous", straggler=1.0, speedup=1.0)
    return [
        home,
        *(
            ServingSetting(
                kind=draw(kinds),
                method=f"m{number}",
                gamma=1.0,
                granularity="expert",
                loads=draw(st.sampled_from(("trace", "trace", "records"))),
                speedup=draw(st.one_of(st.none(), few.map(lambda quarter: 1 + quarter / 4))),
                drop_rate=draw(few) / 4,
            )
            for number in range(draw(st.integers(0, 8)))
        ),
    ]


@settings(max_examples=100, deadline=None)
@given(many_settings())
def test_the_front_is_what_no_other_beats(found: list[ServingSetting]) -> None:
    def beats(one: ServingSetting, other: ServingSetting) -> bool:
        cheaper = cost(one, "pairs") or 0.0, cost(other, "pairs") or 0.0
        at_least = one.reached >= other.reached and cheaper[0] <= cheaper[1]
        simpler = one.is_lossless and not other.is_lossless  # and as good
        return at_least and (one.reached > other.reached or cheaper[0] < cheaper[1] or simpler)

    def is_known(one: ServingSetting) -> bool:
        return one.speedup is not None and one.loads == "trace" and one.kind != "transfers"

    known = [setting for setting in found if is_known(setting)]
    for setting in with_front(found, "pairs"):
        own = setting.model_copy(update={"is_on_front": False})
        beaten = not is_known(own) or any(beats(other, own) for other in known)
        assert setting.is_on_front is not beaten


def test_deployments_that_cannot_be() -> None:
    for ranks, slots, said in ((1, 8, "ranks=1"), (3, 4, "ranks=3: 8 experts"), (4, 1, "at least")):
        with pytest.raises(UsageError, match=said):
            check_deployment(8, ranks, slots)
    assert math.isfinite(speedup(0.0, 2.0, 1.0, 0.0))
