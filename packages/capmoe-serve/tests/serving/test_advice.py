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

from capmoe_serve.advice import Advice, Budget, activation, choose, recommend
from capmoe_serve.advising import (
    Advised,
    ServingDeployment,
    advise_on_records,
    advise_on_trace,
)
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
    if draw(st.booleans()):  # whose speedup nobody knows, or of other loads
        unknown = capacity(1.4, 0.2)
        menu += [
            unknown.model_copy(update={"kind": "activation", "speedup": None, "straggler": None}),
            unknown.model_copy(update={"loads": "records"}),
        ]
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
    for one in menu:
        if one.speedup is None or one.loads == "records":
            continue
        slow = one.speedup < least
        lossy = one.kind == "capacity"
        proven = one.change is not None and most is not None and one.change.low >= -most
        if one.kind != "transfers" and not slow and (most is None or not lossy or proven):
            allowed.append(one)
    if chosen is None:
        assert allowed == []
        return
    assert chosen in allowed
    if budget.at_least_speedup is None:
        assert chosen.speedup == max(one.speedup for one in allowed)
        ties = [one for one in allowed if one.speedup == chosen.speedup]
        assert not chosen.is_lossless or chosen.extra == min(
            one.extra for one in ties if one.is_lossless
        )
        assert chosen.is_lossless == any(one.is_lossless for one in ties)
        return
    if any(one.is_lossless for one in allowed):
        assert chosen.is_lossless
        assert chosen.extra == min(one.extra for one in allowed if one.is_lossless)
    elif known := [one.change for one in allowed if one.change is not None]:
        assert chosen.change is not None
        smallest = min(max(0.0, -change.effect) for change in known)
        alike = [one for one in allowed if one.change is not None and -one.change.high <= smallest]
        assert chosen.drop_rate == min(one.drop_rate for one in alike)
        assert -chosen.change.high <= smallest
    else:
        measured = any(one.change for one in menu)
        assert chosen.drop_rate == min(one.drop_rate for one in allowed) or not measured


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


def test_the_sentences() -> None:
    fast = capacity(1.5, -0.2, 0.2)
    budget = Budget(at_most_points=0.5, at_least_speedup=1.3)
    found = recommend([HOME, lossless(1.1), fast], budget)
    assert found.kind == "capacity"
    assert found.setting == 2
    assert found.sentence == (
        "score γ=1 per expert: the fullest rank gets 1.00 instead of 1.00 times the mean load, so "
        "that the expert step is at most 1.50× as fast; it drops 10.0% of the pairs and changes "
        "accuracy by −0.20 [−0.40, +0.00] points on 1 task; without loss EPLB reaches 1.10×."
    )
    found = recommend([HOME, lossless(1.4, 8), fast], budget)
    assert found.sentence.startswith(
        "Lossless load balancing reaches this, no capacity is needed: EPLB makes"
    )
    found = recommend([HOME, lossless(1.1), capacity(1.5, -0.2, 0.4)], budget)
    assert (found.kind, found.setting) == ("none", None)  # the interval reaches below −0.5
    assert found.sentence.startswith("None: no setting is known to keep the budget (at most 0.5")
    found = recommend([HOME, lossless(1.1), capacity(1.2, -0.2)], budget)
    assert "the fastest, score γ=1 per expert, reaches 1.20×" in found.sentence
    found = recommend([HOME, lossless(1.1), capacity(1.4, None)], budget)
    assert "of 1 of them the loss is not measured" in found.sentence
    assert recommend([HOME], Budget(at_least_speedup=1.0)).sentence.startswith("Nothing need")


def test_where_losses_cannot_be_told_apart_fewer_drops_decide() -> None:
    budget = Budget(at_most_points=1.0, at_least_speedup=1.3)
    blocks, placed = (
        capacity(1.5, -0.2, 0.4, drop_rate=0.2),
        capacity(1.5, -0.3, 0.4, drop_rate=0.1),
    )
    assert choose([HOME, blocks, placed], budget) is placed
    worse = capacity(1.5, -0.6, 0.3, drop_rate=0.1)  # at best it loses 0.3 points
    assert choose([HOME, blocks, worse], budget) is blocks


def test_a_capacity_is_recommended_beside_one_that_drops_less_and_nobody_measured() -> None:
    budget = Budget(at_most_points=0.5, at_least_speedup=1.3)
    placed = capacity(1.5, None, drop_rate=0.04).model_copy(
        update={"placement": "EPLB+8", "granularity": "device"}
    )
    chosen = capacity(1.5, -0.2, 0.2)
    told = " As fast, score γ=1 per device on EPLB+8 drops 4.0%; what the answers lose under it is "
    assert told in recommend([HOME, chosen, placed], budget).sentence
    slower = placed.model_copy(update={"speedup": 1.4})
    more = placed.model_copy(update={"drop_rate": 0.2})
    assert "As fast" not in recommend([HOME, chosen, slower, more], budget).sentence
    # The γ of layers are in the sentence; no server takes them, and the titles are too short.
    layered = chosen.model_copy(update={"gamma": None, "matched": 1.0, "layer_gammas": (0.5, 1.25)})
    found = recommend([HOME, layered], budget)
    assert found.sentence.startswith("score γ by layer ≈1 per expert: the fullest rank")
    assert found.sentence.endswith(" The γ of its layers: 0.5, 1.25.")


def test_activated_experts_are_compared_within_the_budget_of_points() -> None:
    home = HOME.model_copy(update={"active": 30.0, "active_before": 30.0})
    oea = ServingSetting(
        kind="activation",
        method="oea",
        knobs="k0=1",
        active=15.0,
        active_before=30.0,
        drop_rate=0.2,
    )
    within = Budget(at_most_points=0.5)
    assert activation([HOME], within) == ""  # nothing is known, so nothing is said
    assert activation([home, oea], Budget(at_least_speedup=1.2)) == (
        "Activated experts in a layer of a step: 30.0 as served; by OEA 15.0 with k0=1."
    )
    # Its loss is not known, so that it keeps to no budget of points.
    assert activation([home, oea], within).endswith(
        "No setting is known to activate fewer within at most 0.5 points lost."
    )
    record = oea.model_copy(
        update={
            "method": "xshare",
            "loads": "records",
            "active": 9.0,
            "active_before": 12.0,
            "change": capacity(1.0, -0.2, 0.2).change,
        }
    )
    assert activation([home, oea, record], within).endswith(
        "Fewest within at most 0.5 points lost: xshare k0=1, 75% of those before in the records’ "
        "batches, changing accuracy by −0.20 [−0.40, +0.00] points on 1 task."
    )
    dear = record.model_copy(update={"active": 6.0, "change": capacity(1.0, -0.7).change})
    assert "xshare k0=1, 75%" in activation([home, record, dear], within)


def advised(trace: Trace, budget: Budget, quality: Quality | None = None) -> Advised:
    return advise_on_trace(trace, (0.5, 1.0, 2.0), ServingDeployment(4), budget, quality=quality)


def test_ids_alone_give_loads_and_say_that_they_give_no_quality() -> None:
    budget = Budget(at_least_speedup=2.5)
    advice = advised(skewed(), budget).advice
    assert advice.axis == "pairs"
    chosen = advice.settings[advice.recommendation.setting or 0]
    assert (chosen.kind, chosen.change) == ("capacity", None)
    assert "what the answers lose is not known" in advice.recommendation.sentence
    told = " ".join(advice.unknown)
    assert "for score as for every method" in told
    assert "the trace has no gate scores" in told
    assert "a bound for the expert step of a layer" in told
    assert advice.commands[0] == (
        "capmoe-eval run model=custom model.name=made model.pretrained=PATH method=baseline "
        "results_dir=results/mine"
    )
    assert "method=score gamma=0.5" in advice.commands[1]
    assert "ep_size=4" in advice.commands[1]
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
        create_method("baseline"): 30,
        create_method("score", 1.0, ep_size=4): 26,
        create_method("order", 1.0, ep_size=4): 10,
        create_method("expanded_drop", 1.0, ep_size=4): 28,
        create_method("oea", k0=1, renormalize="after"): 27,
        create_method("oea", k0=1, decode="only"): 29,
        create_method("xshare", granularity="device", ep_size=4): 30,
        create_method("xshare", granularity="device", ep_size=2): 30,  # of other ranks
        create_method("score", 1.0, ep_size=2): 30,
        # On EPLB's placement: neither of blocks nor of a placement with copies.
        create_method("score", 1.0, ep_size=4, granularity="device", placement="eplb"): 29,
        create_method("expanded_drop", 1.0, ep_size=4, placement="eplb"): 5,
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
        if method.is_placed:  # which says nothing of blocks
            peak["device_before"] = dict.fromkeys(("mean", "max", "last"), 1.3)
        load: dict[str, float] = {"drop_rate": 0.0 if method.uniform_gamma is None else 0.25}
        if "k0" in method.identity():  # the activated experts are bounded
            load |= {"activated_before": 8.0, "activated_after": 6.0}
        correct = [1] * right + [0] * (40 - right)
        records.record(cell(method), root, correct, load=load, layers=[layer]).write()


@NEEDS_METHODS
def test_records_give_paired_quality_to_the_settings_that_they_are_of(tmp_path: Path) -> None:
    written(tmp_path)
    quality = Quality(read_records(tmp_path, "made"), 4)
    budget = Budget(at_least_speedup=1.6, at_most_points=30.0)
    advice = advised(skewed(), budget, quality).advice
    changes = {s.title: s.change for s in advice.settings if s.change is not None}
    # A capacity of experts drops the same on every placement, one of devices does not; the last
    # ones are of records alone.
    of_records = {
        "expanded drop γ=1 per expert": -5.0,
        "oea k0=1 decode=only": -2.5,
        "oea k0=1 renormalize=after": -7.5,
        "xshare k0=1 expert_budget=0.5 granularity=device": 0.0,
    }
    assert {title: change.effect for title, change in changes.items()} == pytest.approx(
        {
            "score γ=1 per expert": -10.0,
            "score γ=1 per expert on EPLB": -10.0,
            "order γ=1 per expert": -50.0,
            "score γ=1 per device on EPLB": -2.5,
        }
        | of_records
    )
    others = {one.title: one for one in advice.settings if one.loads == "records"}
    assert set(others) == set(of_records)
    assert not any(one.is_on_front for one in others.values())
    straggling = others["expanded drop γ=1 per expert"]
    assert (straggling.straggler, straggling.speedup, straggling.active) == (1.25, 1.6, None)
    unranked = others["oea k0=1 decode=only"]  # its records are of one rank
    assert (unranked.straggler, unranked.speedup) == (None, None)
    assert (unranked.active, unranked.active_before) == (6.0, 8.0)
    assert others["xshare k0=1 expert_budget=0.5 granularity=device"].straggler == 1.25
    assert any("Loads of 4 settings of records alone" in line for line in advice.unknown)
    change = changes["score γ=1 per expert"]
    assert (change.documents, change.tasks, change.drop_rate) == (40, ("piqa",), 0.25)
    assert change.low < -10.0 < change.high
    assert advice.axis == "points"
    assert advice.commands == ()
    assert any("of which no records" in line for line in advice.unknown)
    # Records on a placement are never those of blocks, nor the other way round.
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


@NEEDS_METHODS
def test_oea_has_its_experts_from_the_trace_and_its_accuracy_from_records(tmp_path: Path) -> None:
    written(tmp_path)
    ids = np.argsort(np.random.default_rng(2).random((40, 2, 8)), axis=2)[:, :, :3]
    trace = Trace(8, expert_TLK=ids.astype(np.uint8), step_T=np.arange(40) // 10, model="made")
    quality = Quality(read_records(tmp_path, "made"), 4)
    advice = advised(trace, Budget(at_most_points=20.0), quality).advice
    found = {one.title: one for one in advice.settings if one.method == "oea"}
    assert list(found) == ["oea k0=1 renormalize=after", "oea k0=2", "oea k0=1 decode=only"]
    known, unmeasured, of_decoding = found.values()
    # Records that bound every forward are the trace's; those of decoding have steps of their own.
    assert [one.loads for one in found.values()] == ["trace", "trace", "records"]
    assert known.change is not None
    assert known.change.effect == pytest.approx(-7.5)
    assert unmeasured.change is None
    assert of_decoding.active == 6.0
    assert known.active is not None
    assert unmeasured.active is not None
    assert known.active <= unmeasured.active <= advice.settings[0].active  # type: ignore[operator]
    assert (known.straggler, known.speedup, known.dropped_score) == (None, None, None)
    assert not known.is_on_front
    assert any("Loads after OEA" in line for line in advice.unknown)


@NEEDS_METHODS
def test_records_alone_are_a_basis_too(tmp_path: Path) -> None:
    written(tmp_path)
    quality = Quality(read_records(tmp_path, "made"), 4)
    advice = advise_on_records(quality, ServingDeployment(4), Budget(at_most_points=20.0)).advice
    assert [setting.title for setting in advice.settings] == [
        "contiguous placement",
        "expanded drop γ=1 per expert",
        "oea k0=1 decode=only",
        "oea k0=1 renormalize=after",
        "order γ=1 per expert",
        "score γ=1 per expert",
        "xshare k0=1 expert_budget=0.5 granularity=device",
    ]
    assert advice.settings[0].straggler == 2.0
    assert {setting.speedup for setting in advice.settings[1:]} == {1.6, None}
    chosen = advice.settings[advice.recommendation.setting or 0]
    assert chosen.method == "xshare"
    assert chosen.change is not None
    assert chosen.change.effect == pytest.approx(0.0)
    assert advice.activation.startswith("Fewest within at most 20 points lost: ")
    assert any("lossless load balancing" in line for line in advice.unknown)
    with pytest.raises(UsageError, match="they have ep_size 1, 2, 4"):
        advise_on_records(
            Quality(quality.records, 8), ServingDeployment(8), Budget(at_most_points=1.0)
        )


def test_gammas_that_say_nothing_are_refused() -> None:
    for gamma in (0.0, float("inf")):
        with pytest.raises(UsageError, match="gammas="):
            advise_on_trace(skewed(), (gamma,), ServingDeployment(4), Budget(at_most_points=1.0))
    zero = dataclasses.replace(skewed(), load_SLE=np.zeros((2, 1, 8), int), layers=("0",))
    with pytest.raises(UsageError, match="has no pair"):
        advised(zero, Budget(at_most_points=1.0))
