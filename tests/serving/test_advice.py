"""A recommendation is what a search over all settings finds, and its reason says no more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.report.advice.page import about
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.advice import Advice, Budget, choose, recommend
from capmoe_eval.serving.advising import (
    Advised,
    Deployment,
    advise_on_records,
    advise_on_trace,
)
from capmoe_eval.serving.front import Change, Setting
from capmoe_eval.serving.quality import Quality, read_records
from capmoe_eval.serving.trace import Trace
from tests import records
from tests.serving.test_front import skewed


def capacity(speed: float, effect: float | None, width: float = 0.0, **parts: float) -> Setting:
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
    return Setting(
        kind="capacity",
        method="score",
        gamma=1.0,
        granularity="expert",
        straggler=1.0,
        speedup=speed,
        drop_rate=parts.get("drop_rate", 0.1),
        change=change,
    )


def lossless(speed: float, extra: float = 0.0, kind: str = "placement") -> Setting:
    return Setting.model_validate(
        {"kind": kind, "method": "EPLB", "straggler": 1.0, "speedup": speed, "extra": extra}
    )


HOME = lossless(1.0, kind="unchanged")


@st.composite
def menus(draw: st.DrawFn) -> list[Setting]:
    """Draw menus with equal speedups, unknown losses and intervals about the budgets."""
    few = st.sampled_from((1.0, 1.1, 1.2, 1.4))
    menu = [HOME]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(("placement", "placement", "transfers")))
        menu.append(lossless(draw(few), draw(st.sampled_from((0.0, 8.0))), kind))
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
def test_the_choice_is_what_a_search_finds(menu: list[Setting], budget: Budget) -> None:
    place = choose(menu, budget)
    least, most = budget.at_least_speedup or 0.0, budget.at_most_points
    allowed = []
    for number, one in enumerate(menu):
        slow = one.speedup < least
        lossy = one.kind == "capacity"
        proven = one.change is not None and most is not None and one.change.low >= -most
        if one.kind != "transfers" and not slow and (most is None or not lossy or proven):
            allowed.append(number)
    if place is None:
        assert allowed == []
        return
    assert place in allowed
    chosen, rest = menu[place], [menu[number] for number in allowed]
    if budget.at_least_speedup is None:
        assert chosen.speedup == max(one.speedup for one in rest)
        ties = [one for one in rest if one.speedup == chosen.speedup]
        assert not chosen.is_lossless or chosen.extra == min(
            one.extra for one in ties if one.is_lossless
        )
        assert chosen.is_lossless == any(one.is_lossless for one in ties)
        return
    if any(one.is_lossless for one in rest):
        assert chosen.is_lossless
        assert chosen.extra == min(one.extra for one in rest if one.is_lossless)
    elif known := [one.change for one in rest if one.change is not None]:
        assert chosen.change is not None
        lost = [max(0.0, -change.effect) for change in known]
        assert max(0.0, -chosen.change.effect) == min(lost)
    else:
        measured = any(one.change for one in menu)
        assert chosen.drop_rate == min(one.drop_rate for one in rest) or not measured


def test_the_sentences() -> None:
    fast = capacity(1.5, -0.2, 0.2)
    budget = Budget(at_most_points=0.5, at_least_speedup=1.3)
    found = recommend([HOME, lossless(1.1), fast], budget)
    assert found.kind == "capacity" and found.setting == 2
    assert found.sentence == (
        "score γ=1 per expert: the fullest rank gets 1.00 instead of 1.00 times the mean load, so "
        "that the expert step is at most 1.50× as fast; it drops 10.0% of the pairs and changes "
        "accuracy by −0.20 [−0.40, +0.00] points on 1 task; without loss EPLB reaches 1.10×."
    )
    found = recommend([HOME, lossless(1.4, 8), fast], budget)
    assert found.sentence.startswith(
        "Balancing without loss reaches this, no capacity is needed: EPLB makes"
    )
    found = recommend([HOME, lossless(1.1), capacity(1.5, -0.2, 0.4)], budget)
    assert (found.kind, found.setting) == ("none", None)  # the interval reaches below −0.5
    assert found.sentence.startswith("None: no setting is known to keep the budget (at most 0.5")
    found = recommend([HOME, lossless(1.1), capacity(1.2, -0.2)], budget)
    assert "the fastest, score γ=1 per expert, reaches 1.20×" in found.sentence
    found = recommend([HOME, lossless(1.1), capacity(1.4, None)], budget)
    assert "of 1 of them the loss is not measured" in found.sentence
    assert recommend([HOME], Budget(at_least_speedup=1.0)).sentence.startswith("Nothing need")


def advised(trace: Trace, budget: Budget, quality: Quality | None = None) -> Advised:
    return advise_on_trace(trace, (0.5, 1.0, 2.0), Deployment(4), budget, quality=quality)


def test_ids_alone_give_loads_and_say_that_they_give_no_quality() -> None:
    budget = Budget(at_least_speedup=2.5)
    advice = advised(skewed(), budget).advice
    assert advice.axis == "pairs"
    chosen = advice.settings[advice.recommendation.setting or 0]
    assert (chosen.kind, chosen.change) == ("capacity", None)
    assert "what the answers lose is not known" in advice.recommendation.sentence
    told = " ".join(advice.unknown)
    assert "for score as for every method" in told and "the trace has no gate scores" in told
    assert "a bound for the expert step of a layer" in told
    assert advice.commands[0] == (
        "python -m capmoe_eval model=custom model.name=made model.pretrained=PATH method=baseline "
        "results_dir=results/mine"
    )
    assert "method=score gamma=0.5" in advice.commands[1] and "ep_size=4" in advice.commands[1]
    # A loss that nobody measured keeps no budget of points.
    strict = Budget(at_least_speedup=2.5, at_most_points=5.0)
    assert advised(skewed(), strict).advice.recommendation.kind == "none"


def test_prompts_and_decode_steps_are_not_mixed_silently() -> None:
    budget = Budget(at_least_speedup=1.2)
    both = dataclasses.replace(skewed(), decode_S=np.arange(6) % 3 > 0)
    told = advised(both, budget).advice
    assert "6 steps, 2 of prompts and 4 of decoding together (--only" in about(told)
    one = advised(both.only("decode"), budget).advice
    assert "4 steps of decoding," in about(one)
    assert one.settings != told.settings
    unsaid = "Which steps are of prompts and which of decoding"
    assert not any(unsaid in line for line in told.unknown + one.unknown)
    assert any(unsaid in line for line in advised(skewed(), budget).advice.unknown)


def test_an_advice_is_read_back_from_its_json() -> None:
    advice = advised(skewed(), Budget(at_least_speedup=1.2)).advice
    assert Advice.model_validate_json(advice.model_dump_json()) == advice
    with pytest.raises(ValueError, match="names no setting"):
        Advice.model_validate(
            dict(advice)
            | {"recommendation": advice.recommendation.model_copy(update={"setting": 99})}
        )
    with pytest.raises(ValueError, match="asks nothing"):
        Budget()


def cell(method: Method) -> Cell:
    return records.cell(method, model="made", task="piqa")


def written(root: Path) -> None:
    """Records of a model: of 40 documents the baseline has 30, score 26, and order 10."""
    rights = {
        Method("baseline"): 30,
        Method("score", 1.0, ep_size=4): 26,
        Method("order", 1.0, ep_size=4): 10,
        Method("expanded_drop", 1.0, ep_size=4): 28,
    }
    for method, right in rights.items():
        peak = {
            f"{unit}_{when}": dict.fromkeys(("mean", "max", "last"), value)
            for unit, when, value in (
                ("expert", "before", 4.0),
                ("expert", "after", 1.0),
                ("device", "before", 2.0),
                ("device", "after", 1.25),
            )
        }
        layer = records.layer([16, 8, 4, 4, 0, 0, 0, 0], peak=peak)
        load = {"drop_rate": 0.0 if method.gamma is None else 0.25}
        correct = [1] * right + [0] * (40 - right)
        records.record(cell(method), root, correct, load=load, layers=[layer]).write()


def test_records_give_paired_quality_to_the_settings_that_they_are_of(tmp_path: Path) -> None:
    written(tmp_path)
    quality = Quality(read_records(tmp_path, "made"), 4)
    budget = Budget(at_least_speedup=1.6, at_most_points=30.0)
    advice = advised(skewed(), budget, quality).advice
    changes = {s.title: s.change for s in advice.settings if s.change is not None}
    assert {title: change.effect for title, change in changes.items()} == pytest.approx(
        {"score γ=1 per expert": -10.0, "order γ=1 per expert": -50.0}
    )
    change = changes["score γ=1 per expert"]
    assert (change.documents, change.tasks, change.drop_rate) == (40, ("piqa",), 0.25)
    assert change.low < -10.0 < change.high
    assert advice.axis == "points" and advice.commands == ()
    assert any("of which no records" in line for line in advice.unknown)
    # With other ranks the records say nothing.
    other = Quality(read_records(tmp_path, "made"), 2)
    assert other.change("score", 1.0, "expert") is None
    with pytest.raises(UsageError, match="no whole record of model mad; it has made"):
        read_records(tmp_path, "mad")


def test_records_alone_are_a_basis_too(tmp_path: Path) -> None:
    written(tmp_path)
    quality = Quality(read_records(tmp_path, "made"), 4)
    advice = advise_on_records(quality, Deployment(4), Budget(at_most_points=20.0)).advice
    assert [setting.title for setting in advice.settings] == [
        "the placement in blocks",
        "expanded drop γ=1 per expert",
        "order γ=1 per expert",
        "score γ=1 per expert",
    ]
    assert advice.settings[0].straggler == 2.0
    assert {setting.speedup for setting in advice.settings[1:]} == {1.6}
    chosen = advice.settings[advice.recommendation.setting or 0]
    assert chosen.method == "expanded_drop" and chosen.change is not None
    assert chosen.change.effect == pytest.approx(-5.0)
    assert any("balancing without loss" in line for line in advice.unknown)
    with pytest.raises(UsageError, match="they have ep_size 1, 4"):
        advise_on_records(Quality(quality.records, 2), Deployment(2), Budget(at_most_points=1.0))


def test_gammas_that_say_nothing_are_refused() -> None:
    for gamma in (0.0, float("inf")):
        with pytest.raises(UsageError, match="gammas="):
            advise_on_trace(skewed(), (gamma,), Deployment(4), Budget(at_most_points=1.0))
    zero = dataclasses.replace(skewed(), load_SLE=np.zeros((2, 1, 8), int), layers=("0",))
    with pytest.raises(UsageError, match="has no pair"):
        advised(zero, Budget(at_most_points=1.0))
