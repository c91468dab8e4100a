"""The front has what no other beats, of settings on the steps that nothing was planned on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve.advising import ServingDeployment, check_deployment, trace_settings
from capmoe_serve.settings import ServingSetting, cost, speedup, with_front
from capmoe_serve.trace import Trace

GAMMAS = (0.4, 1.0, 1.1, 3.0)
DEPLOYMENT = ServingDeployment(4, 3)


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
    before, after = (trace_settings(each, GAMMAS, DEPLOYMENT) for each in (trace, changed))
    changed_by_plan = {
        title
        for title in {setting.title for setting in (*before, *after)}
        if [s for s in before if s.title == title] != [s for s in after if s.title == title]
    }
    assert {"EPLB+4", "LPLB+4", "score γ=1 per device on EPLB+4"} <= changed_by_plan
    unplanned = {s.title for s in before if s.placement is None and s.matched is None}
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
    only = trace_settings(whole, (1.0,), ServingDeployment(2, 4))
    kinds = [setting.kind for setting in only]
    assert kinds == ["unchanged", "transfers", *["capacity"] * 6]
    assert all(s.placement is None and s.layer_gammas is None for s in only)


def test_a_capacity_that_drops_nothing_changes_nothing_and_a_small_one_does() -> None:
    every = trace_settings(skewed(), (0.5, 8.0), DEPLOYMENT)
    unchanged = every[0]
    wide = [s for s in every if s.gamma == 8.0 and s.placement is None]
    small = [setting for setting in every if setting.gamma == 0.5]
    assert all(s.straggler == pytest.approx(unchanged.straggler) for s in wide)
    assert all(s.speedup == pytest.approx(1.0) and s.drop_rate == 0.0 for s in wide)
    assert all(s.speedup > 1.5 and s.drop_rate > 0.3 for s in small)
    assert all(s.dropped_score is None for s in every)  # counts have no scores
    # On a placement a wide one is that placement, and it drops nothing.
    placed = {s.title: s for s in every if s.kind == "placement"}
    of_devices = [s for s in every if s.gamma == 8.0 and s.granularity == "device"]
    for setting in of_devices[-2:]:
        assert setting.placement in ("EPLB", "EPLB+4")
        alone = placed[setting.placement]
        assert setting.drop_rate == 0.0
        assert setting.straggler == pytest.approx(alone.straggler)
        assert (setting.extra, setting.set_up) == (alone.extra, alone.set_up)


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
    kinds = st.sampled_from(("placement", "transfers", "capacity", "capacity"))
    home = ServingSetting(kind="unchanged", method="contiguous", straggler=1.0, speedup=1.0)
    return [
        home,
        *(
            ServingSetting(
                kind=draw(kinds),
                method=f"m{number}",
                gamma=1.0,
                granularity="expert",
                straggler=1.0,
                speedup=1 + draw(few) / 4,
                drop_rate=draw(few) / 4,
            )
            for number in range(draw(st.integers(0, 8)))
        ),
    ]


@settings(max_examples=100, deadline=None)
@given(many_settings())
def test_the_front_is_what_no_other_beats(menu: list[ServingSetting]) -> None:
    def beats(first: ServingSetting, second: ServingSetting) -> bool:
        costs = cost(first, "pairs") or 0.0, cost(second, "pairs") or 0.0
        at_least = first.speedup >= second.speedup and costs[0] <= costs[1]
        simpler = first.is_lossless and not second.is_lossless  # and as good
        return at_least and (first.speedup > second.speedup or costs[0] < costs[1] or simpler)

    rivals = [setting for setting in menu if setting.kind != "transfers"]
    for marked, setting in zip(with_front(menu, "pairs"), menu, strict=True):
        beaten = setting.kind == "transfers" or any(beats(other, setting) for other in rivals)
        assert marked.is_on_front is not beaten


def test_experts_that_ranks_do_not_divide_are_compared_with_copies() -> None:
    """As 60 experts and 4 copies on 8 ranks; nothing has an expert at home on one rank alone."""
    trace = Trace(60, load_SLE=np.roll(skewed(experts=60).loads(), 30, axis=2))  # 30 is hot
    every = trace_settings(trace, (1.0,), ServingDeployment(8, 8))
    titles = [setting.title for setting in every if setting.is_lossless]
    assert titles == ["contiguous placement", "EPLB+4", "LPLB+4"]
    assert {setting.extra for setting in every if setting.is_lossless} == {4.0}
    unchanged, eplb, lplb = every[:3]
    assert unchanged.straggler > eplb.straggler >= lplb.straggler >= 1.0
    assert {setting.granularity for setting in every[3:]} == {"device"}
    more = trace_settings(trace, (1.0,), ServingDeployment(8, 9))
    assert {"EPLB+4", "EPLB+12", "LPLB+12"} < {setting.title for setting in more}


def test_deployments_that_cannot_be() -> None:
    for deployment, part in (
        (ServingDeployment(1, 8), "ranks=1"),
        (ServingDeployment(3, 2), "have space for 6 of 8 experts; give at least 3"),
        (ServingDeployment(4, 9), "needs one of each at most; give 2 to 8"),
        (ServingDeployment(4, 2, nodes=2), "nodes=2: must divide groups=1"),
    ):
        with pytest.raises(UsageError, match=part):
            check_deployment(8, deployment)
    assert math.isfinite(speedup(0.0, 2.0, 1.0, 0.0))
