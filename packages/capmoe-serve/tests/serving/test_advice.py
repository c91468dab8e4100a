"""A recommendation is what a search over all settings finds, and its reason says no more."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import Paired
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_report.effects import pooled
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capmoe_serve.advice import (
    advise,
    choose,
    compared_tasks,
    cost,
    interval,
    is_on_front,
    model_records,
    reason,
    trace_settings,
    unknown,
    with_changes,
)
from capmoe_serve.trace import Trace
from tests import records

GAMMAS = (0.4, 1.0, 1.1, 3.0)


def skewed(steps: int = 6, experts: int = 8, seed: int = 0) -> Trace:
    """A trace of counts in which expert 0 gets most."""
    generator = np.random.default_rng(seed)
    load = generator.integers(5, 15, (steps, 2, experts))
    load[:, :, 0] += 60
    return Trace(experts, load_SLE=load, model="made", source="made")


def capacity(
    speed: float,
    effect: float | None,
    width: float = 0.0,
    drop_rate: float = 0.1,
    extra: float = 0.0,
) -> dict[str, Any]:
    change = math.nan if effect is None else effect
    interval = {"low": change - width, "high": change + width, "own_low": change - width}
    row = {"kind": "capacity", "speedup": speed, "drop_rate": drop_rate, "extra": extra}
    return row | {"effect": change, **interval, "dropped_score": math.nan}


def lossless(speed: float, extra: float = 0.0, kind: str = "placement") -> dict[str, Any]:
    return capacity(speed, None, drop_rate=0.0) | {"kind": kind, "extra": extra}


HOME = lossless(1.0, kind="unchanged")


@st.composite
def menus(draw: st.DrawFn) -> pd.DataFrame:
    """Draw menus with equal speedups, unknown losses and intervals about the budgets."""
    few = st.sampled_from((1.0, 1.1, 1.2, 1.4))
    menu = [lossless(draw(few), kind="unchanged")]
    copies = st.sampled_from((0.0, 8.0))
    menu += [lossless(draw(few), draw(copies)) for _ in range(draw(st.integers(0, 3)))]
    for _ in range(draw(st.integers(0, 5))):
        effect = draw(st.sampled_from((None, 0.2, 0.0, -0.3, -0.5, -2.0)))
        drop_rate = draw(st.sampled_from((0.1, 0.3)))
        extra = 0.0 if effect is not None else draw(copies)  # no record has copies
        width = draw(st.sampled_from((0.0, 0.4)))
        menu.append(capacity(draw(few), effect, width, drop_rate, extra))
    return pd.DataFrame(menu)


BUDGETS = ((0.5, None), (None, 1.2), (0.5, 1.2), (0.0, 1.4))
"""Points that may be lost, and the speedup that is asked."""


@settings(max_examples=150, deadline=None)
@given(menus(), st.sampled_from(BUDGETS))
@example(pd.DataFrame([HOME, capacity(1.4, None, extra=8.0)]), (None, 1.2))
@example(pd.DataFrame([HOME, capacity(1.4, None, extra=8.0), capacity(1.4, None)]), (None, 1.2))
def test_the_choice_is_what_a_search_finds(
    menu: pd.DataFrame, budget: tuple[float | None, float | None]
) -> None:
    most, least = budget
    place, rows = choose(menu, most, least), menu.to_dict("records")
    allowed = [
        row
        for row in rows
        if row["speedup"] >= (least or 0.0)
        and (most is None or row["kind"] != "capacity" or row["low"] >= -most)
        and (row["kind"] != "capacity" or row["extra"] == 0)
    ]
    if place is None:
        assert allowed == []
        return
    chosen = rows[place]
    assert chosen in allowed
    if least is None:  # the fastest; of equals without loss, with the fewest copies
        allowed = [row for row in allowed if row["speedup"] >= max(r["speedup"] for r in allowed)]
    without_loss = [row for row in allowed if row["kind"] != "capacity"]
    measured = [row for row in allowed if not math.isnan(row["effect"])]
    if without_loss:
        assert chosen["kind"] != "capacity"
        assert chosen["extra"] == min(row["extra"] for row in without_loss)
        assert chosen["kind"] == "unchanged" or rows[0] not in without_loss
    elif least is not None and measured:
        smallest = min(max(0.0, -row["effect"]) for row in measured)
        alike = [row for row in measured if -row["high"] <= smallest]
        assert chosen in alike
        assert chosen["drop_rate"] == min(row["drop_rate"] for row in alike)
    elif least is not None and menu["effect"].isna().all():
        assert chosen["drop_rate"] == min(row["drop_rate"] for row in allowed)


@settings(max_examples=50, deadline=None)
@given(menus())
def test_the_front_is_what_no_other_beats(menu: pd.DataFrame) -> None:
    rows = list(zip(menu["speedup"], cost(menu), menu["kind"] != "capacity", strict=True))

    def beats(first: tuple[float, float, bool], second: tuple[float, float, bool]) -> bool:
        at_least = first[0] >= second[0] and first[1] <= second[1]
        # Without loss is simpler than a capacity that loses nothing.
        return at_least and (first[:2] != second[:2] or first[2] > second[2])

    # A setting of unknown cost is not on it.
    assert is_on_front(menu) == [
        not math.isnan(row[1]) and not any(beats(other, row) for other in rows) for row in rows
    ]


def test_the_second_half_is_judged_and_the_first_is_planned_on() -> None:
    trace = skewed()
    # The first half likes another expert: no capacity sees it, and every plan does.
    other = trace.load_SLE.copy()
    other[:3] = np.roll(other[:3], 5, axis=2)
    changed = dataclasses.replace(trace, load_SLE=other)
    before, after = (
        trace_settings(each, (*GAMMAS, 8.0), 4, 3).set_index("title") for each in (trace, changed)
    )
    is_planned = before["placement"].str.startswith("EPLB")
    pd.testing.assert_frame_equal(before[~is_planned], after[after["placement"] == "contiguous"])
    for title in ("EPLB+4", "score γ=1 per device on EPLB+4"):
        assert before.loc[title, "speedup"] >= after.loc[title, "speedup"]
        assert not before.loc[title].equals(after.loc[title])
    plan = before.loc["EPLB+4"]
    unchanged = before.loc["contiguous placement", "straggler"]
    assert plan["speedup"] == pytest.approx(unchanged / plan["straggler"])
    assert plan["speedup"] > 1.3
    assert (plan["drop_rate"], plan["extra"]) == (0.0, 4)
    # A capacity that drops nothing is its placement.
    never, columns = (
        "score γ=8 per device on EPLB+4",
        ["straggler", "speedup", "drop_rate", "extra"],
    )
    assert before.loc[never, columns].tolist() == pytest.approx(plan[columns].tolist())


def test_a_trace_of_one_step_is_judged_on_contiguous_placement_alone() -> None:
    only = trace_settings(Trace(8, load_SLE=skewed().load_SLE[:1]), (1.0,), 2, 5)
    assert only["kind"].tolist() == ["unchanged", *["capacity"] * 6]
    assert set(only["placement"]) == {"contiguous"}


def test_experts_that_ranks_do_not_divide_are_compared_with_copies() -> None:
    """As 60 experts and 4 copies on 8 ranks; nothing has an expert at home on one rank alone."""
    trace = Trace(60, load_SLE=np.roll(skewed(experts=60).loads(), 30, axis=2))  # 30 is hot
    every = trace_settings(trace, (1.0,), 8, 8)
    assert every["title"][:2].tolist() == ["contiguous placement", "EPLB+4"]
    assert set(every["extra"]) == {4.0}
    assert every["straggler"][0] > every["straggler"][1] >= 1.0
    assert set(every["granularity"][2:]) == {"device"}
    more = trace_settings(trace, (1.0,), 8, 9)
    assert {"EPLB+4", "EPLB+12"} < set(more["title"])


@given(st.integers(0, 10), st.integers(0, 10), st.sampled_from((100, 300)))
@settings(deadline=None)
def test_an_interval_is_bonett_and_prices_and_wider_with_each_changed_document(
    gained: int, lost: int, documents: int
) -> None:
    def of(gained: int, lost: int) -> tuple[float, float]:
        changes = np.zeros(documents)
        changes[:gained], changes[gained : gained + lost] = 1.0, -1.0
        return interval(pooled({"m": {"t": Paired((("t", "d"),), changes, 0 * changes)}}))

    low, high = of(gained, lost)
    assert low <= 100 * (gained - lost) / documents <= high
    for more in (of(gained + 1, lost), of(gained, lost + 1)):
        assert more[1] - more[0] > high - low
    # The formula as published: each share with one document more, of two documents more.
    up, down = (gained + 1) / (documents + 2), (lost + 1) / (documents + 2)
    reach = 1.96 * math.sqrt((up + down - (up - down) ** 2) / (documents + 2))
    published = 100 * (up - down - reach), 100 * (up - down + reach)
    assert (low, high) == pytest.approx(published, abs=0.5 * 100 / documents)


MADE: dict[Method, int] = {
    create_method("baseline"): 30,
    create_method("score", 1.0, ep_size=4): 26,
    create_method("order", 1.0, ep_size=4): 10,
    create_method("order", 2.0, ep_size=4): 30,
    create_method("score", 1.0, ep_size=2): 30,  # of other ranks
    # On EPLB's placement: neither of contiguous placement nor of one with copies.
    create_method("score", 1.0, ep_size=4, granularity="device", placement="eplb"): 29,
}
"""The documents of 40 that each method has right."""


def write_records(
    root: Path,
    rights: Mapping[Method, int],
    task: str = "piqa",
    documents: int = 40,
    experts: int = 8,
    layers: int = 2,
) -> tuple[Record, ...]:
    """Write records of the model ``made`` beside others of it; return all."""
    for method, right in rights.items():
        load: dict[str, Any] = {"drop_rate": 0.0 if method.uniform_gamma is None else 0.25}
        load["decode_forwards"] = 9 if task == "gsm8k" else 0
        cell = records.cell(method, model="made", task=task)
        correct = [1] * right + [0] * (documents - right)
        shape = [records.layer([16, 8, 4, 4, *[0] * (experts - 4)])] * layers
        records.record(cell, root, correct, load=load, layers=shape).write()
    return model_records(root, "made")


def evaluated(root: Path, rights: dict[tuple[float | None, str], int]) -> pd.DataFrame:
    """Return settings with the changes of records: of 300 documents so many right, by γ and task.

    The baseline has the γ None.
    """
    for (gamma, task), right in rights.items():
        method = create_method("baseline" if gamma is None else "score", gamma, ep_size=4)
        of_model = write_records(root, {method: right}, task, 300)
    menu = trace_settings(skewed(), (0.5, 1.0, 2.0), 4, 3).set_index("title", drop=False)
    titles = [f"score γ={gamma:g} per expert" for gamma in (0.5, 1.0, 2.0)]
    return with_changes(menu.loc[["contiguous placement", *titles]], of_model, 4)


def test_losses_are_compared_on_the_tasks_that_most_settings_have(tmp_path: Path) -> None:
    baseline = {(None, task): 200 for task in ("piqa", "boolq", "rte")}
    rights = {(0.5, "piqa"): 199, (0.5, "boolq"): 200, (1.0, "piqa"): 200, (1.0, "boolq"): 199}
    menu = evaluated(tmp_path, baseline | rights | {(1.0, "rte"): 140, (2.0, "boolq"): 200})
    assert compared_tasks(menu) == ["boolq", "piqa"]
    half, one, two = (menu.iloc[place] for place in (1, 2, 3))
    assert half["effect"] == one["effect"] == pytest.approx(-1 / 6)
    # A setting with a task more keeps a budget on all of its tasks, or does not keep it.
    assert (one["tasks"], one["documents"]) == (("boolq", "piqa", "rte"), 900)
    assert one["own_effect"] == pytest.approx(-61 / 9)
    assert one["own_low"] < one["own_effect"] < one["own_high"]
    assert half["own_low"] == half["low"]
    menu = menu.reset_index(drop=True).assign(speedup=[1.0, 1.3, 1.4, 1.5])
    assert choose(menu, 1.0, 1.2) == 1
    assert choose(menu, 10.0, None) == 2
    text = reason(menu, 2, "any", 1.2)
    assert "−0.17 [−0.73, +0.40] points on 2 tasks (−6.78 [" in text
    assert "on all 3 of its records), in records that drop 25.0%" in text
    # A setting with a task less counts as not measured, and its task is named.
    assert (two["tasks"], two["own_effect"]) == (("boolq",), 0.0)
    assert math.isnan(two["effect"])
    lines = unknown(menu, skewed())
    assert any(line.startswith("What the answers lose on rte: too few") for line in lines)
    assert any("such as score γ=2 per expert, which lacks piqa." in line for line in lines)


def test_settings_without_common_tasks_are_refused(tmp_path: Path) -> None:
    baseline = {(None, task): 200 for task in ("piqa", "boolq")}
    with pytest.raises(UsageError, match=r"^results: .*γ=1 per expert: piqa; .*γ=2.*: boolq\)"):
        evaluated(tmp_path, baseline | {(1.0, "piqa"): 200, (2.0, "boolq"): 180})


def test_a_budget_of_points_alone_does_not_speak_of_a_speedup() -> None:
    menu = pd.DataFrame([HOME | {"title": "home"}, lossless(1.2, 8) | {"title": "EPLB+8"}])
    for chosen, start in enumerate(("No change: no faster setting", "Lossless load balancing")):
        text = reason(menu, chosen, "at most 1 point lost", None)
        assert text.startswith(start)
        assert "known to keep the budget (at most 1 point lost)" in text
        assert "measured" not in text
    # A capacity whose loss nobody measured could be faster: what is served is not all that can be.
    faster = [capacity(1.4, None), capacity(1.4, -3.0), capacity(0.9, None)]
    text = reason(pd.DataFrame([HOME | {"title": "home"}, *faster]), 0, "any", None)
    assert text.endswith("; 2 capacities are faster, 1 of them without a measured loss.")


def test_records_give_paired_quality_to_the_settings_that_they_are_of(tmp_path: Path) -> None:
    of_model = write_records(tmp_path, MADE)
    budget = {"at_least_speedup": 1.6, "at_most_points": 30.0}
    advice, _ = advise(skewed(), (0.5, 1.0, 2.0), ranks=4, records=of_model, **budget)
    changed = pd.DataFrame(advice["settings"]).dropna(subset="effect").set_index("title")
    # A capacity of experts drops the same on every placement, one of devices does not. Records on
    # a placement are never those of contiguous placement, nor the other way round.
    assert changed["effect"].to_dict() == pytest.approx(
        {
            "score γ=1 per expert": -10.0,
            "score γ=1 per expert on EPLB": -10.0,
            "order γ=1 per expert": -50.0,
            "order γ=2 per expert": 0.0,
            "score γ=1 per device on EPLB": -2.5,
        }
    )
    row = changed.loc["score γ=1 per expert"]
    assert (row["documents"], row["tasks"], row["record_drop_rate"]) == (40, ("piqa",), 0.25)
    assert row["low"] < -10.0 < row["high"]
    # No document of 40 changed, but two could have.
    equal = changed.loc["order γ=2 per expert"]
    assert (equal["low"], equal["high"]) == pytest.approx((-6.93, 6.93), abs=0.01)
    assert (advice["axis"], advice["commands"]) == ("points", [])
    assert any("of which no records" in line for line in advice["unknown"])
    # Where none of the measured ones keeps the budget, the others are to be measured.
    budget = {"at_least_speedup": 2.1, "at_most_points": 1.0}
    advice, _ = advise(skewed(), (0.5, 1.0), ranks=4, records=of_model, **budget)
    assert (advice["recommended"], swept_gammas(advice)) == (None, {0.5, 1.0})
    of_device = create_method("score", 1.0, ep_size=4, granularity="device")
    more = write_records(tmp_path, {of_device: 20})
    advice, _ = advise(skewed(), (0.5, 1.0), ranks=4, records=more, **budget)
    assert (advice["recommended"], swept_gammas(advice)) == (None, {0.5})
    # With other ranks the records say nothing.
    other = with_changes(trace_settings(skewed(), (1.0,), 8, 2), of_model, 8)
    assert other["effect"].isna().all()
    with pytest.raises(UsageError, match="no whole record of model mad; it has made; name one"):
        model_records(tmp_path, "mad")
    with pytest.raises(UsageError, match=r"no whole record of model m\*; it has made"):
        model_records(tmp_path, "m*")


DECODES = {("only", "gsm8k"): 20, ("constrained", "gsm8k"): 10, ("constrained", "piqa"): 30}
"""Documents of 40 that are right at γ=1 by ``decode`` and task; with prompts alone all 30 are."""


@pytest.mark.parametrize(
    ("kinds", "held", "effect", "decode", "line"),
    [
        (None, DECODES, 0.0, None, "Losses are those of prompts; decode steps"),
        ("pppppp", DECODES, 0.0, None, ""),
        ("dddddd", DECODES, -25.0, "only", "gsm8k with decode=only or decode=constrained count"),
        ("dddddd", [*DECODES][1:], -50.0, "only", "gsm8k with decode=only or decode=constrained"),
        ("dddddd", [], None, "only", "gsm8k with decode=only or decode=constrained count"),
        ("pppddd", DECODES, -50.0, "constrained", "gsm8k with decode=constrained count"),
        ("pppddd", [*DECODES][::2], None, "constrained", "gsm8k with decode=constrained count"),
    ],
)
def test_the_kind_of_the_steps_decides_which_records_count(
    kinds: str | None,
    held: Iterable[tuple[str, str]],
    effect: float | None,
    decode: str | None,
    line: str,
    tmp_path: Path,
) -> None:
    score = partial(create_method, "score", 1.0, ep_size=4)
    for value, task in held:
        write_records(tmp_path, {score(decode=value): DECODES[value, task]}, task)
    for task in ("gsm8k", "piqa"):
        of_model = write_records(tmp_path, {create_method("baseline"): 30, score(): 30}, task)
    kind_S = None if kinds is None else np.array([*kinds]) == "d"
    trace = dataclasses.replace(skewed(), decode_S=kind_S)
    budget = {"at_least_speedup": 2.1, "at_most_points": 1.0}
    advice, _ = advise(trace, (0.5, 1.0), ranks=4, records=of_model, **budget)
    rows = {row["title"]: row for row in advice["settings"]}
    assert (rows["score γ=1 per expert"]["effect"], advice["recommended"]) == (effect, None)
    expected = ["gsm8k"] if decode else ["gsm8k", "piqa"]
    assert advice["tasks"] == ([] if effect is None else expected)
    # The commands measure what counts.
    words = [f"decode={decode}", "tasks=gsm8k"] if decode else []
    for command, part in zip(advice["commands"], (words[1:], words), strict=True):
        assert sorted(re.findall("tasks=[^ ]+|decode=[^ ]+", command)) == part
    about = [text for text in advice["unknown"] if "decode" in text]
    assert len(about) == bool(line)
    assert line in "".join(about)


def test_tasks_that_hardly_need_experts_judge_no_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = pd.DataFrame({"made": {"boolq": 15.0, "piqa": 30.0}})  # with all experts disabled
    monkeypatch.setattr("capmoe_serve.advice.dev_losses", lambda _: losses)
    score = create_method("score", 1.0, ep_size=4)
    write_records(tmp_path, {create_method("baseline"): 30, score: 30}, "boolq")
    of_model = write_records(tmp_path, {create_method("baseline"): 30, score: 20}, "piqa")
    budget = {"at_least_speedup": 2.1, "at_most_points": 20.0}
    advice, _ = advise(skewed(), (1.0,), ranks=4, records=of_model, **budget)
    rows = {row["title"]: row for row in advice["settings"]}
    assert (rows["score γ=1 per expert"]["effect"], advice["tasks"]) == (-25.0, ["piqa"])
    text = "What the answers lose on boolq: these tasks hardly need the experts of made."
    assert text in advice["unknown"]


def swept_gammas(advice: dict[str, Any]) -> set[float]:
    """Return the capacity factors of an advice's sweep."""
    (swept,) = (word for word in advice["commands"][1].split() if word.startswith("gamma="))
    return {*map(float, swept.removeprefix("gamma=").split(","))}


def test_the_commands_measure_what_records_could_make_the_recommended_setting() -> None:
    advice, _ = advise(skewed(), GAMMAS, ranks=4, at_most_points=1.0)
    menu = pd.DataFrame(advice["settings"])
    can_be = menu[(menu["kind"] == "capacity") & (menu["extra"] == 0)]
    best = menu.loc[menu["kind"] != "capacity", "speedup"].max()
    assert swept_gammas(advice) == {*can_be.loc[can_be["speedup"] > best, "gamma"]}
    # Of those that reach a speedup the three largest drop least.
    advice, _ = advise(skewed(), (0.4, *GAMMAS, 1.5), ranks=4, at_least_speedup=2.1)
    assert swept_gammas(advice) == {1.0, 1.1, 1.5}
    # Where no capacity is needed nothing has to be measured.
    advice, _ = advise(skewed(), GAMMAS, ranks=4, at_least_speedup=1.1)
    assert (advice["settings"][advice["recommended"]]["kind"], advice["commands"]) == (
        "placement",
        [],
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"n_experts": 6, "load_SLE": np.ones((4, 2, 6), int)}, "the trace has 2 MoE layers of 6"),
        ({"top_k": 4, "load_SLE": np.full((4, 2, 8), 4)}, "2 MoE layers of 8 experts, top-4; give"),
        ({"layers": ("0", "1", "2"), "load_SLE": np.ones((4, 3, 8), int)}, "3 MoE layers of 8"),
    ],
)
def test_records_of_a_model_of_another_shape_are_refused(
    change: dict[str, Any], part: str, tmp_path: Path
) -> None:
    trace, of_model = dataclasses.replace(skewed(), **change), write_records(tmp_path, MADE)
    with pytest.raises(UsageError, match="6 records with 2 MoE layers of 8 experts, top-2") as info:
        advise(trace, (1.0,), ranks=2, at_most_points=1.0, records=of_model)
    assert part in str(info.value)


def test_records_of_another_shape_are_left_out_and_a_partial_trace_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_model = write_records(tmp_path, MADE)
    write_records(tmp_path, {create_method("baseline"): 1}, "boolq", experts=16)
    every = write_records(tmp_path, {create_method("baseline"): 1}, "rte", layers=1)
    part = Trace(8, load_SLE=skewed().load_SLE[:, :1], top_k=None, model="made")
    budget = {"ranks": 4, "at_most_points": 30.0}
    expected, _ = advise(skewed(), (1.0, 2.0), records=of_model, **budget)
    advice, _ = advise(skewed(), (1.0, 2.0), records=every, **budget)
    assert advice["settings"] == expected["settings"]
    assert advice["unknown"] == [
        "What 1 record with 1 MoE layer of 8 experts, top-2 and 1 record with 2 MoE layers of 16 "
        "experts, top-2 say: they are left out, because the trace has 2 MoE layers of 8 experts.",
        *expected["unknown"],
    ]
    # A trace need not have every layer.
    advice, _ = advise(part, (1.0,), records=of_model, **budget)
    assert advice["unknown"][0] == (
        "Whether the records are of the model that was served: the records have 2 MoE layers, the "
        "trace has 1."
    )
    assert (
        "warning: results: the records have 2 MoE layers, the trace has 1;"
        in capsys.readouterr().err
    )


def test_an_advice_for_more_ranks_than_experts_is_of_placements_alone() -> None:
    advice, _ = advise(skewed(), (1.0,), ranks=12, at_least_speedup=9.0)
    assert [row["title"] for row in advice["settings"]] == ["contiguous placement", "EPLB+4"]
    assert (advice["recommended"], advice["axis"], advice["commands"]) == (None, "pairs", [])


def test_capacities_on_copies_alone_are_not_called_unmeasured() -> None:
    advice, _ = advise(skewed(experts=10), (0.5,), ranks=4, at_least_speedup=2.5)
    assert "capacities are fast enough, but on copies of experts, where no" in advice["sentence"]
    assert advice["commands"] == []


def test_an_advice_on_nothing_is_refused() -> None:
    zero = dataclasses.replace(skewed(), load_SLE=np.zeros((2, 1, 8), int), layers=("0",))
    with pytest.raises(UsageError, match="has no pair"):
        advise(zero, (1.0,), ranks=4, at_most_points=1.0)
