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

from capmoe_serve.advice import Advice, Budget, choose, reason
from capmoe_serve.advising import ServingDeployment, advise_on_trace
from capmoe_serve.page import about
from capmoe_serve.quality import Quality, read_records
from capmoe_serve.settings import Change, ServingSetting
from capmoe_serve.trace import Trace
from serving.test_front import skewed
from tests import records


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
def test_the_choice_is_what_a_search_finds(menu: list[ServingSetting], budget: Budget) -> None:
    chosen = choose(menu, budget)
    least, most = budget.at_least_speedup or 0.0, budget.at_most_points
    allowed = []
    for setting in menu:
        slow = setting.speedup < least
        lossy = setting.kind == "capacity"
        proven = setting.change is not None and most is not None and setting.change.low >= -most
        if setting.kind != "transfers" and not slow and (most is None or not lossy or proven):
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
        assert chosen.change is not None
        smallest = min(max(0.0, -change.effect) for change in changes)
        alike = [s for s in allowed if s.change is not None and -s.change.high <= smallest]
        assert chosen.drop_rate == min(s.drop_rate for s in alike)
        assert -chosen.change.high <= smallest
    else:
        measured = any(s.change for s in menu)
        assert chosen.drop_rate == min(s.drop_rate for s in allowed) or not measured


@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_of_equals_the_simplest_is_chosen_whatever_the_order(budget: Budget) -> None:
    """A plan goes before a program in every step, fewer copies before both, and nothing first."""
    best = [
        lossless(1.4, kind="unchanged"),
        lossless(1.4),
        lossless(1.4, 8),
        lossless(1.4, 8).model_copy(update={"method": "LPLB+8"}),
        capacity(1.4, -0.1),
    ]
    for first in range(4):
        for rest in itertools.permutations(best[first:]):
            assert choose([HOME, *rest], budget) is best[first]


def test_the_sentence_has_the_numbers_of_what_is_recommended() -> None:
    fast = capacity(1.5, -0.2, 0.2)
    budget = Budget(at_most_points=0.5, at_least_speedup=1.3)
    for menu, part in (
        ([lossless(1.1), fast], "1.00 instead of 1.00 times the mean load"),
        ([lossless(1.1), fast], "at most 1.50× as fast; it drops 10.0% of the pairs"),
        ([lossless(1.1), fast], "by −0.20 [−0.40, +0.00] points on 1 task; without loss EPLB"),
        ([lossless(1.4, 8), fast], "at most 1.40× as fast, with 8 copies"),
        ([lossless(1.1), capacity(1.5, -0.2, 0.4)], "None"),  # the interval reaches below −0.5
        ([lossless(1.1), capacity(1.2, -0.2)], "the fastest, score γ=1 per expert, reaches 1.20×"),
        ([lossless(1.1), capacity(1.4, None)], "of 1 of them the loss is not measured"),
    ):
        assert part in reason([HOME, *menu], budget)
    assert reason([HOME], Budget(at_least_speedup=1.0)).startswith("Nothing need")


def test_where_losses_cannot_be_told_apart_fewer_drops_decide() -> None:
    budget = Budget(at_most_points=1.0, at_least_speedup=1.3)
    contiguous, placed = (
        capacity(1.5, -0.2, 0.4, drop_rate=0.2),
        capacity(1.5, -0.3, 0.4, drop_rate=0.1),
    )
    assert choose([HOME, contiguous, placed], budget) is placed
    worse = capacity(1.5, -0.6, 0.3, drop_rate=0.1)  # at best it loses 0.3 points
    assert choose([HOME, contiguous, worse], budget) is contiguous


def test_a_capacity_is_recommended_beside_one_that_drops_less_and_nobody_measured() -> None:
    budget = Budget(at_most_points=0.5, at_least_speedup=1.3)
    placed = capacity(1.5, None, drop_rate=0.04).model_copy(
        update={"placement": "EPLB+8", "granularity": "device"}
    )
    chosen = capacity(1.5, -0.2, 0.2)
    assert "score γ=1 per device on EPLB+8 drops 4.0%" in reason([HOME, chosen, placed], budget)
    slower = placed.model_copy(update={"speedup": 1.4})
    more = placed.model_copy(update={"drop_rate": 0.2})
    assert "EPLB+8" not in reason([HOME, chosen, slower, more], budget)
    # The γ of layers are in the sentence; no server takes them, and the titles are too short.
    layered = chosen.model_copy(update={"gamma": None, "matched": 1.0, "layer_gammas": (0.5, 1.25)})
    sentence = reason([HOME, layered], budget)
    assert sentence.startswith("score γ by layer ≈1 per expert: the fullest rank")
    assert sentence.endswith(" The γ of its layers: 0.5, 1.25.")


def advised(trace: Trace, budget: Budget, quality: Quality | None = None) -> Advice:
    return advise_on_trace(trace, (0.5, 1.0, 2.0), ServingDeployment(4), budget, quality=quality)[0]


def test_ids_alone_give_loads_and_say_that_they_give_no_quality() -> None:
    budget = Budget(at_least_speedup=2.5)
    advice = advised(skewed(), budget)
    assert advice.axis == "pairs"
    assert advice.chosen is not None
    assert (advice.chosen.kind, advice.chosen.change) == ("capacity", None)
    assert "what the answers lose is not known" in advice.sentence
    assert any("the trace has no gate scores" in line for line in advice.unknown)
    assert advice.commands[0] == (
        "capmoe-eval run model=custom model.name=made model.pretrained=PATH method=baseline "
        "results_dir=results/mine"
    )
    assert "method=score gamma=0.5" in advice.commands[1]
    assert "ep_size=4" in advice.commands[1]
    # A loss that nobody measured keeps no budget of points.
    strict = Budget(at_least_speedup=2.5, at_most_points=5.0)
    assert advised(skewed(), strict).chosen is None


def test_prompts_and_decode_steps_are_not_mixed_silently() -> None:
    budget = Budget(at_least_speedup=1.2)
    both = dataclasses.replace(skewed(), decode_S=np.arange(6) % 3 > 0)
    together = advised(both, budget)
    assert "6 steps, 2 of prompts and 4 of decoding together (--only" in about(together)
    decode = advised(both.only("decode"), budget)
    assert "4 steps of decoding," in about(decode)
    assert decode.settings != together.settings
    kinds = "Which steps are of prompts and which of decoding"
    assert not any(kinds in line for line in together.unknown + decode.unknown)
    assert any(kinds in line for line in advised(skewed(), budget).unknown)


def test_an_advice_is_read_back_from_its_json() -> None:
    advice = advised(skewed(), Budget(at_least_speedup=1.2))
    assert Advice.model_validate_json(advice.model_dump_json()) == advice
    with pytest.raises(ValueError, match="names no setting"):
        Advice.model_validate(dict(advice) | {"recommended": 99})
    with pytest.raises(ValueError, match="asks nothing"):
        Budget()


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
            advise_on_trace(skewed(), (gamma,), ServingDeployment(4), Budget(at_most_points=1.0))
    zero = dataclasses.replace(skewed(), load_SLE=np.zeros((2, 1, 8), int), layers=("0",))
    with pytest.raises(UsageError, match="has no pair"):
        advised(zero, Budget(at_most_points=1.0))
