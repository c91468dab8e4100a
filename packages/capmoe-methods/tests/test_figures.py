"""Figures that the paper lacks: by hand, by loops, and the numbers of the committed records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.sources import FigurePlans, Sources, gather
from capmoe_eval.results.frames import pick
from capmoe_eval.routing.registry import create_method
from hypothesis import given
from hypothesis import strategies as st
from tests.golden import BENCH, RESULTS, drawn, figures, framed, read
from tests.golden.test_golden import differences
from tests.records import calibrated, of_images, record_of
from tests.report.figures import material
from tests.report.figures.material import peaked, values
from tests.report.figures.test_data import loads, of_layers

from capmoe_methods.comparison import lost
from capmoe_methods.figures import adaptive, macs, waste
from capmoe_methods.figures.quality import pareto_front

RIGHT = [1] * 40


def of_pictures(
    name: str, gamma: float | None, wrong: int, drop: float, peak: float, **knobs: Any
) -> Record:
    """A record with so many wrong answers to 20 images, two to an image."""
    load = {"drop_rate": drop, "mean_peak_after": peak}
    parts = {"load": load, "layers": [peaked("device_after", peak / 2)]}
    method = create_method(name, gamma, ep_size=8, **knobs)
    return of_images(record_of(method, [0] * wrong + RIGHT[wrong:], task="mme", parts=parts))


def of_macs(records: list[Record]) -> Sources:
    return material.evidence({"tasks": {"mme": "MME", "mmbench": "MMBench"}}, all=records)


CURVE = [
    of_pictures("baseline", None, 0, 0.0, 5.0),
    of_pictures("score", 0.5, 16, 0.6, 0.5),
    of_pictures("score", 1.0, 8, 0.4, 1.0),
]


def test_a_method_is_compared_at_equal_gamma_and_at_equal_loads() -> None:
    """At γ=0.5 MACS loses 4 of 40 and drops as Token Drop does half way from γ=1 to none."""
    records = [
        *CURVE,
        of_pictures("score", 0.5, 20, 0.6, 0.5, modality="image_first"),
        of_pictures("macs", 0.5, 4, 0.2, 3.0),
        of_pictures("macs", 0.5, 12, 0.5, 0.75, reroute="none"),
        of_pictures("macs", 2.0, 0, 0.0, 6.0),
        of_pictures("macs", 0.5, 0, 0.2, 3.0, rho=0),
    ]
    shown = of_macs(records)
    rows = macs.losses_and_loads(shown)
    assert values(rows, "line", "lost") == {
        "Token Drop": [40, 20],
        "Token Drop, images first": [50],
        "MACS": [10, 0],
        "MACS without rerouting": [30],
        "MACS, ρ=0": [0],
    }
    assert "MMBench: nothing is drawn without the result that has no limit." in shown.notes
    notes = {note.split(", points")[0]: note for note in shown.notes if "Token Drop's" in note}
    fewer, beyond = notes["MME: MACS, γ=0.5"], notes["MME: MACS, γ=2"]
    assert "at equal γ -30.0 [" in fewer  # 10 points lost, Token Drop 40: the sign of the axis
    drops, bounded = (
        pick(shown.results.cells, method=name, gamma=0.5, modality=None, reroute=reroute, rho=rho)
        for name, reroute, rho in (("score", None, None), ("macs", "local", 1.0))
    )
    ends = lost(shown.results, drops, bounded, ["mme"])
    assert "at equal γ {:+.1f} [{:+.1f}, {:+.1f}]".format(*ends) in fewer  # as on the page
    assert "at equal drops +0.0 [" in fewer  # half of γ=1, half of no limit
    assert "an equally full expert +0.0 [" in fewer
    assert "rank" not in fewer  # the curve ends at γ=1, and no limit knows no ranks
    assert "at equal drops +0.0 [" in notes["MME: MACS without rerouting, γ=0.5"]
    assert "an equally full rank +0.0 [" in notes["MME: MACS without rerouting, γ=0.5"]
    assert beyond.count("[") == 1
    assert "at equal drops +0.0 [" in beyond
    assert "at equal γ -40.0 [" in notes["MME: MACS, ρ=0, γ=0.5"]
    assert len(macs.images_macs(of_macs(records)).axes) == 4


def test_a_record_of_other_documents_is_left_out() -> None:
    other = of_pictures("macs", 0.5, 4, 0.2, 3.0)
    (documents,) = other.capmoe["documents"].values()
    documents["documents"] = "another"
    shown = of_macs([*CURVE, Record.of(other.content, other.path)])
    assert list(macs.losses_and_loads(shown)["line"].unique()) == ["Token Drop"]
    assert shown.notes[0] == "MME: MACS γ=0.5 is left out: other documents of mme."


def setting(
    model: str, gamma: float | None, budget: float | None, drops: float, peak: float, wrong: int
) -> Record:
    """A record that drops such a share, whose fullest expert is so full, with wrong answers."""
    parts: dict[str, Any] = {"load": {"drop_rate": drops}}
    if budget is None:
        method, one = create_method("score", gamma), peaked("expert_after", peak)
    else:
        method = create_method("score", "adaptive", budget=budget)  # type: ignore[arg-type]
        one = peaked("expert_after", peak, gamma=1.5)
        parts["calibration"] = calibrated([1.5])
    parts["layers"] = [one]
    return record_of(method, [0] * wrong + [1] * (40 - wrong), model=model, parts=parts)


def test_adaptive_factors_stand_beside_the_static_ones() -> None:
    static, chosen = [], []
    for model, gain in (("m", 0.1), ("n", 0.3)):
        static += [
            setting(model, 1.0, None, 0.4, 1.0, 8),
            setting(model, 2.0, None, 0.2, 2.0, 4),
            setting(model, 3.0, None, 0.1, 3.0, 0),
        ]
        chosen += [setting(model, None, 0.1, 0.3, 1.5 - gain, 8)]
    titles = {"models": {"m": "Mine", "n": "Nine"}}
    shown = material.evidence(titles, static=static, adaptive=chosen)
    rows = adaptive.against_static(shown)
    mine = rows[(rows["quantity"] == "setting") & (rows["model"] == "Mine")]
    assert values(mine, "budget_of", "dropped_percent", "value") == {
        "static": [(40.0, 1.0), (20.0, 2.0), (10.0, 3.0)],
        "pairs": [(30.0, pytest.approx(1.4))],
    }
    # The static γ between 1 and 2 with 30 % of drops has 1.5; with t over two models.
    factors = rows[(rows["quantity"] == "straggler") & rows["budget"].isna()].set_index("model")
    every = factors.loc["mean over models", ["value", "value_low", "value_high"]].tolist()
    assert every == pytest.approx([-0.2, -0.2 - 1.2706, -0.2 + 1.2706], abs=1e-3)
    assert factors.loc[["Mine", "Nine"], "value"].tolist() == pytest.approx([-0.1, -0.3])
    # At 1.4 and 1.2 static factors would have 6.4 and 7.2 of 40 wrong; 8 are.
    points = rows[(rows["quantity"] == "accuracy") & rows["budget"].isna()].set_index("model")
    assert points.loc[["Mine", "Nine"], "value"].tolist() == pytest.approx([-4.0, -2.0])
    # At 0.3 the line through 0.1 and 0.2, drawn on, is at 1.
    assert "no gain is shown" in shown.notes[0]
    assert "+0.300" in shown.notes[1]
    ticks = adaptive.adaptive(shown).axes[1].get_xticklabels()
    assert [text.get_text() for text in ticks] == ["10", "all"]


@pytest.mark.slow
def test_the_committed_records_give_the_golden_figures() -> None:
    file = Path(__file__).with_name("figures.csv")
    assert differences(read(file), framed(figures("capmoe_methods"))) == []
    assert len(drawn(file)) == 11


@pytest.mark.slow
def test_token_drop_has_intervals_and_a_note_has_plans_of_another_task() -> None:
    spec = get_figure("comparators_ranks")
    sources = gather(spec, FigurePlans(("profile=zoo", f"results_dir={RESULTS}")), BENCH)
    *questions, generation = spec(sources).axes[:4]
    assert [len(axes.containers) for axes in questions] == [2] * len(questions)
    assert len(generation.containers) == 1  # nobody asked Token Drop for answers on ranks
    text = "trained tiny OLMoE 1.70 contiguous, 1.51 EPLB+8 planned on winogrande"
    assert any(text in note for note in sources.notes)


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(points)
def test_the_front_is_what_a_sweep_by_cost_finds(pairs: list[tuple[int, int]]) -> None:
    front: set[int] = set()
    best: tuple[int, int] | None = None
    for place in sorted(range(len(pairs)), key=lambda place: (pairs[place][0], -pairs[place][1])):
        if best is None or pairs[place][1] > best[1]:
            best = pairs[place]
        if pairs[place] == best:
            front.add(place)
    rows = pd.DataFrame(pairs, columns=["cost", "quality"])
    is_best = pareto_front(rows, "cost", "quality")
    assert {place for place, best in enumerate(is_best) if best} == front


@given(loads, st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
def test_the_best_gamma_is_that_of_a_loop(load: list[int], penalty: float) -> None:
    grid = of_layers([load])
    best, least = None, float("inf")
    for gamma, drop, empty in grid.itertuples(index=False):
        if penalty * drop + empty < least:
            best, least = gamma, penalty * drop + empty
    assert waste.best_gamma(grid, penalty) == best
