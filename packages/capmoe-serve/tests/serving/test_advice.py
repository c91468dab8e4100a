"""A recommendation is what a search over all settings finds, and its reason says no more."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.satellites import NEEDS_METHODS

from capmoe_serve.advice import (
    Advice,
    Budget,
    Change,
    ServingDeployment,
    ServingSetting,
    choose,
    cost,
    with_front,
)
from capmoe_serve.advising import (
    Quality,
    advise_on_trace,
    read_records,
    speedup,
    trace_settings,
)
from capmoe_serve.trace import Trace
from tests import records

GAMMAS = (0.4, 1.0, 1.1, 3.0)
DEPLOYMENT = ServingDeployment(ranks=4, experts_per_rank=3)


def skewed(steps: int = 6, experts: int = 8, seed: int = 0) -> Trace:
    """A trace of counts in which expert 0 gets most."""
    generator = np.random.default_rng(seed)
    load = generator.integers(5, 15, (steps, 2, experts))
    load[:, :, 0] += 60
    return Trace(experts, load_SLE=load, model="made", source="made")


def capacity(
    speed: float, effect: float | None, width: float = 0.0, **parts: float
) -> ServingSetting:
    change = None
    if effect is not None:
        change = Change(
            effect=effect,
            low=effect - width,
            high=effect + width,
            documents=10,
            tasks=("t",),
            drop_rate=0.1,
        )
    return ServingSetting(
        kind="capacity",
        method="score",
        gamma=1.0,
        granularity="expert",
        straggler=1.0,
        speedup=speed,
        drop_rate=parts.get("drop_rate", 0.1),
        change=change,
    )


def lossless(speed: float, extra: float = 0.0, kind: str = "placement") -> ServingSetting:
    return ServingSetting.model_validate(
        {"kind": kind, "method": "EPLB", "straggler": 1.0, "speedup": speed, "extra": extra}
    )


HOME = lossless(1.0, kind="unchanged")


@st.composite
def menus(draw: st.DrawFn) -> list[ServingSetting]:
    """Draw menus with equal speedups, unknown losses and intervals about the budgets."""
    few = st.sampled_from((1.0, 1.1, 1.2, 1.4))
    menu = [HOME]
    copies = st.sampled_from((0.0, 8.0))
    menu += [lossless(draw(few), draw(copies)) for _ in range(draw(st.integers(0, 3)))]
    for _ in range(draw(st.integers(0, 5))):
        effect = draw(st.sampled_from((None, 0.2, 0.0, -0.3, -0.5, -2.0)))
        drop_rate = draw(st.sampled_from((0.1, 0.3)))
        menu.append(
            capacity(draw(few), effect, draw(st.sampled_from((0.0, 0.4))), drop_rate=drop_rate)
        )
    return menu


BUDGETS = [
    Budget(at_most_points=0.5),
    Budget(at_least_speedup=1.2),
    Budget(at_most_points=0.5, at_least_speedup=1.2),
    Budget(at_most_points=0.0, at_least_speedup=1.4),
]


@settings(max_examples=300, deadline=None)
@given(menus(), st.sampled_from(BUDGETS))
def test_the_choice_is_what_a_search_finds(menu: list[ServingSetting], budget: Budget) -> None:
    chosen = choose(menu, budget)
    least, most = budget.at_least_speedup or 0.0, budget.at_most_points
    allowed = []
    for setting in menu:
        slow = setting.speedup < least
        lossy = setting.kind == "capacity"
        proven = setting.change is not None and most is not None and setting.change.low >= -most
        if not slow and (most is None or not lossy or proven):
            allowed.append(setting)
    if chosen is None:
        assert allowed == []
        return
    assert chosen in allowed
    if budget.at_least_speedup is None:
        assert chosen.speedup == max(s.speedup for s in allowed)
        ties = [s for s in allowed if s.speedup == chosen.speedup]
        assert not chosen.is_lossless or chosen.extra == min(s.extra for s in ties if s.is_lossless)
        assert chosen.is_lossless == any(s.is_lossless for s in ties)
        return
    if any(s.is_lossless for s in allowed):
        assert chosen.is_lossless
        assert chosen.extra == min(s.extra for s in allowed if s.is_lossless)
    elif changes := [s.change for s in allowed if s.change is not None]:
        smallest = min(max(0.0, -change.effect) for change in changes)
        alike = [s for s in allowed if s.change is not None and -s.change.high <= smallest]
        assert chosen.drop_rate == min(s.drop_rate for s in alike)
        assert -chosen.change.high <= smallest
    else:
        measured = any(s.change for s in menu)
        assert chosen.drop_rate == min(s.drop_rate for s in allowed) or not measured


@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_of_equals_the_simplest_is_chosen_whatever_the_order(budget: Budget) -> None:
    best = [
        lossless(1.4, kind="unchanged"),
        lossless(1.4),
        lossless(1.4, 8),
        capacity(1.4, -0.1),
    ]
    for first in range(3):
        for rest in itertools.permutations(best[first:]):
            assert choose([HOME, *rest], budget) is best[first]


@settings(max_examples=100, deadline=None)
@given(menus())
def test_the_front_is_what_no_other_beats(menu: list[ServingSetting]) -> None:
    def beats(first: ServingSetting, second: ServingSetting) -> bool:
        costs = cost(first, "pairs") or 0.0, cost(second, "pairs") or 0.0
        at_least = first.speedup >= second.speedup and costs[0] <= costs[1]
        simpler = first.is_lossless and not second.is_lossless  # and as good
        return at_least and (first.speedup > second.speedup or costs[0] < costs[1] or simpler)

    for marked, setting in zip(with_front(menu, "pairs"), menu, strict=True):
        assert marked.is_on_front is not any(beats(other, setting) for other in menu)


def advised(trace: Trace, budget: Budget, quality: Quality | None = None) -> Advice:
    return advise_on_trace(
        trace, (0.5, 1.0, 2.0), ServingDeployment(ranks=4), budget, quality=quality
    )[0]


def test_the_second_half_is_judged_and_the_first_is_planned_on() -> None:
    trace = skewed()
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
    assert {"EPLB+4", "score γ=1 per device on EPLB+4"} <= changed_by_plan
    unplanned = {s.title for s in before if s.placement is None}
    assert changed_by_plan & unplanned <= {"EPLB", "EPLB+4"}
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
    only = trace_settings(whole, (1.0,), ServingDeployment(ranks=2, experts_per_rank=4))
    kinds = [setting.kind for setting in only]
    assert kinds == ["unchanged", *["capacity"] * 6]
    assert all(s.placement is None for s in only)


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


def test_experts_that_ranks_do_not_divide_are_compared_with_copies() -> None:
    """As 60 experts and 4 copies on 8 ranks; nothing has an expert at home on one rank alone."""
    trace = Trace(60, load_SLE=np.roll(skewed(experts=60).loads(), 30, axis=2))  # 30 is hot
    every = trace_settings(trace, (1.0,), ServingDeployment(ranks=8, experts_per_rank=8))
    titles = [setting.title for setting in every if setting.is_lossless]
    assert titles == ["contiguous placement", "EPLB+4"]
    assert {setting.extra for setting in every if setting.is_lossless} == {4.0}
    unchanged, eplb = every[:2]
    assert unchanged.straggler > eplb.straggler >= 1.0
    assert {setting.granularity for setting in every[2:]} == {"device"}
    more = trace_settings(trace, (1.0,), ServingDeployment(ranks=8, experts_per_rank=9))
    assert {"EPLB+4", "EPLB+12"} < {setting.title for setting in more}


def test_an_advice_is_read_back_from_its_json() -> None:
    advice = advised(skewed(), Budget(at_least_speedup=1.2))
    assert Advice.model_validate_json(advice.model_dump_json()) == advice
    with pytest.raises(ValueError, match="names no setting"):
        Advice.model_validate(dict(advice) | {"recommended": 99})


def cell(method: Method) -> Cell:
    return records.cell(method, model="made", task="piqa")


def written(root: Path) -> None:
    """Records of a model: of 40 documents the baseline has 30, score 26, and order 10."""
    rights = {
        create_method("baseline"): 30,
        create_method("score", 1.0, ep_size=4): 26,
        create_method("order", 1.0, ep_size=4): 10,
        create_method("score", 1.0, ep_size=2): 30,  # of other ranks
        # On EPLB's placement: neither of contiguous placement nor of one with copies.
        create_method("score", 1.0, ep_size=4, granularity="device", placement="eplb"): 29,
    }
    for method, right in rights.items():
        load = {"drop_rate": 0.0 if method.uniform_gamma is None else 0.25}
        correct = [1] * right + [0] * (40 - right)
        layers = [records.layer([16, 8, 4, 4, 0, 0, 0, 0])]
        records.record(cell(method), root, correct, load=load, layers=layers).write()


@NEEDS_METHODS
def test_records_give_paired_quality_to_the_settings_that_they_are_of(tmp_path: Path) -> None:
    written(tmp_path)
    quality = Quality(read_records(tmp_path, "made"), 4)
    budget = Budget(at_least_speedup=1.6, at_most_points=30.0)
    advice = advised(skewed(), budget, quality)
    changes = {s.title: s.change for s in advice.settings if s.change is not None}
    # A capacity of experts drops the same on every placement, one of devices does not.
    assert {title: change.effect for title, change in changes.items()} == pytest.approx(
        {
            "score γ=1 per expert": -10.0,
            "score γ=1 per expert on EPLB": -10.0,
            "order γ=1 per expert": -50.0,
            "score γ=1 per device on EPLB": -2.5,
        }
    )
    change = changes["score γ=1 per expert"]
    assert (change.documents, change.tasks, change.drop_rate) == (40, ("piqa",), 0.25)
    assert change.low < -10.0 < change.high
    assert advice.axis == "points"
    assert advice.commands == ()
    assert any("of which no records" in line for line in advice.unknown)
    # Records on a placement are never those of contiguous placement, nor the other way round.
    of_devices = {"ep_size": 4, "granularity": "device"}
    assert quality.change(create_method("score", 1.0, **of_devices)) is None
    placed = create_method("score", 1.0, **of_devices, placement="eplb")
    assert quality.change(placed) == changes["score γ=1 per device on EPLB"]
    by_order = create_method("order", 1.0, **of_devices, placement="eplb")
    assert quality.change(by_order) is None
    settings = {setting.title: setting for setting in advice.settings}
    for title in ("score γ=1 per device", "score γ=1 per device on EPLB+4"):
        assert settings[title].change is None
    # With other ranks the records say nothing.
    other = Quality(read_records(tmp_path, "made"), 8)
    assert other.change(create_method("score", 1.0, ep_size=8)) is None
    with pytest.raises(UsageError, match="no whole record of model mad; it has made"):
        read_records(tmp_path, "mad")


def test_gammas_that_say_nothing_are_refused() -> None:
    for gamma in (0.0, float("inf")):
        with pytest.raises(UsageError, match="gammas="):
            advise_on_trace(
                skewed(), (gamma,), ServingDeployment(ranks=4), Budget(at_most_points=1.0)
            )
    zero = dataclasses.replace(skewed(), load_SLE=np.zeros((2, 1, 8), int), layers=("0",))
    with pytest.raises(UsageError, match="has no pair"):
        advised(zero, Budget(at_most_points=1.0))
