"""Methods beside Token Drop, from records of which losses and loads are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.statistics import interval
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.golden import figures, framed, read
from tests.golden.test_golden import differences
from tests.records import calibrated, of_images, record_of
from tests.report.figures import material
from tests.report.figures.material import peaked, values

from capmoe_methods.figures import adaptive, comparators, macs

RIGHT = [1] * 40
STOCK = create_method("baseline")


def found(
    method: Method, task: str, wrong: int, peak: float = 2.0, after: float | None = None
) -> Record:
    """A record with so many wrong answers, whose forwards would activate 20 experts.

    The router alone would load the fullest expert with 6 times the mean, the fullest rank with 2.
    """
    load = {"mean_peak_before": 6.0, "mean_peak_after": peak}
    load |= {"activated_before": after and 20.0, "activated_after": after}
    parts = {"load": load, "layers": [peaked("device_after", peak / 2)]}
    return record_of(method, [0] * wrong + RIGHT[wrong:], task=task, parts=parts)


def balance(
    method: str, straggler: float, on: str = "piqa", judged: str = "piqa"
) -> dict[str, Any]:
    about = {"model": "m", "planned_on": on, "judged_on": judged, "of": "prompts"}
    return about | {"method": method, "straggler": straggler}


DROP = create_method("score", 1.0, ep_size=1)
OEA = create_method("oea", k0=2)
RANKS = create_method("score", 1.0, ep_size=8)
REROUTE = create_method("token_reroute", 1.5, granularity="device", ep_size=8)


def of_models(models: int = 1, **parts: list[Record]) -> FigureRecords:
    titles = {"m": "Mine"} | {f"m{number}": f"M{number}" for number in range(1, models)}
    stock = [found(STOCK, task, 0) for task in ("obqa", "piqa", "gsm8k")]
    return material.evidence({"models": titles}, stock=stock, **parts)


def on_questions() -> FigureRecords:
    return of_models(
        drop=[found(DROP, "obqa", 4, 1.0, 20.0), found(DROP, "piqa", 8, 1.5, 19.0)],
        oea=[found(OEA, "obqa", 0, 5.0, 10.0), found(OEA, "piqa", 1, 7.0, 12.0)],
        uncounted=[found(create_method("laser"), task, 2, 3.0) for task in ("obqa", "piqa")],
        half=[found(create_method("oea", k0=3), "obqa", 0, 5.0, 10.0)],
    )


def test_a_comparator_stands_at_what_its_records_say_beside_token_drop_and_no_limit() -> None:
    shown = on_questions()
    rows = comparators.settings(shown)
    assert list(rows["of"].unique()) == ["questions (OBQA, PIQA)"]
    lines = rows.set_index("line")
    drop, oea = lines.loc["Token Drop"], lines.loc["OEA"]
    columns = ["activated", "expert_peak", "lost"]
    assert drop[columns].tolist() == pytest.approx([39 / 40, 1.25, 15])
    assert oea[columns].tolist() == pytest.approx([0.55, 6.0, 1.25])
    unlimited = ["unlimited_activated", "unlimited_expert_peak"]
    assert oea[unlimited].tolist() == [1.0, 6.0]
    lost = interval({"obqa": [100] * 4 + [0] * 36, "piqa": [100] * 8 + [0] * 32})
    assert drop[["lost_low", "lost_high"]].tolist() == pytest.approx([lost.low, lost.high])
    # An older record says nothing of activated experts.
    assert lines.loc["LASER", ["activated", "unlimited_activated"]].isna().all()
    assert "Mine, questions: OEA is left out: not every task is there." in shown.notes


def on_ranks(*balances: dict[str, Any]) -> FigureRecords:
    evidence = of_models(
        ranks=[found(RANKS, "obqa", 2, 1.8), found(RANKS, "piqa", 2, 2.2)],
        reroute=[found(REROUTE, task, 0, 3.0) for task in ("obqa", "piqa")],
        steps=[found(replace(REROUTE, decode="only"), "gsm8k", 4, 2.4)],
    )
    return replace(evidence, balances=balances)


def test_balancing_without_loss_is_a_line_across_the_ranks() -> None:
    shown = on_ranks(
        balance("contiguous", 2.0),
        balance("EPLB", 1.5),
        balance("EPLB+8", 1.1),
        balance("LPLB+8", 1.05),
        balance("EPLB+8", 1.7, on="winogrande"),  # a stale plan
        balance("EPLB+8", 1.2, on="winogrande", judged="winogrande"),  # no task of the figure
    )
    rows = comparators.ranks(shown)
    lossless = rows[rows["line"].str.contains("nothing dropped")]
    assert lossless[["of", "line", "rank_peak"]].values.tolist() == [
        ["questions (OBQA, PIQA)", "EPLB+R, nothing dropped", 1.1],
        ["questions (OBQA, PIQA)", "LPLB+R, nothing dropped", 1.05],
    ]
    assert "Balancing of questions was measured on PIQA." in shown.notes
    questions, generation = comparators.comparators_ranks(shown).axes
    dashes = {line.get_label(): line.get_linestyle() for line in questions.get_lines()}
    assert (dashes["EPLB+R, nothing dropped"], dashes["LPLB+R, nothing dropped"]) == ("--", ":")
    assert "nothing dropped" not in str([line.get_label() for line in generation.get_lines()])


def test_more_models_than_markers_are_drawn() -> None:
    names = ["m", *(f"m{number}" for number in range(1, 9))]
    evidence = of_models(9, oea=[])
    records = {
        part: [record_of(method, RIGHT, model=name, task="obqa") for name in names]
        for part, method in (("stock", STOCK), ("oea", OEA))
    }
    figure = comparators.comparators(replace(evidence, records=records))
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"Mine", "M8"} <= texts


def of_pictures(
    name: str, gamma: float | None, wrong: int, drop: float, peak: float, **knobs: Any
) -> Record:
    """A record with so many wrong answers to 20 images, two to an image."""
    load = {"drop_rate": drop, "mean_peak_after": peak}
    parts = {"load": load, "layers": [peaked("device_after", peak / 2)]}
    method = create_method(name, gamma, ep_size=8, **knobs)
    return of_images(record_of(method, [0] * wrong + RIGHT[wrong:], task="mme", parts=parts))


def of_macs(records: list[Record]) -> FigureRecords:
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
    notes = {note.split(", less")[0]: note for note in shown.notes if note.startswith("MME: MACS")}
    better, beyond = notes["MME: MACS, γ=0.5"], notes["MME: MACS, γ=2"]
    assert "at equal γ +30.0 [" in better  # what the method claims
    assert "at equal drops +0.0 [" in better  # half of γ=1, half of no limit
    assert "an equally full expert +0.0 [" in better
    assert "rank" not in better  # the curve ends at γ=1, and no limit knows no ranks
    assert "at equal drops +0.0 [" in notes["MME: MACS without rerouting, γ=0.5"]
    assert "an equally full rank +0.0 [" in notes["MME: MACS without rerouting, γ=0.5"]
    assert beyond.count("[") == 1
    assert "at equal drops +0.0 [" in beyond
    assert "at equal γ +40.0 [" in notes["MME: MACS, ρ=0, γ=0.5"]
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
    golden = read(Path(__file__).with_name("figures.csv"))
    assert differences(golden, framed(figures("capmoe_methods"))) == []
