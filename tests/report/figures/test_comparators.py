"""The methods of other papers beside Token Drop, from records of which each number is known."""

from __future__ import annotations

from typing import Any

import pytest

from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.timings.findings import Balance
from capmoe_eval.paper.statistics import compare
from capmoe_eval.report.figures.comparators import draw_comparators, measure_comparators
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.records import record_of
from tests.report.figures import material
from tests.report.figures.material import peaked

RIGHT = [1] * 40
STOCK = create_method("baseline")


def found(
    method: Method, task: str, wrong: int, peak: float = 2.0, after: float | None = None
) -> Record:
    """A record with so many wrong answers, whose forwards would activate 20 experts."""
    load = {"mean_peak_after": peak, "activated_before": after and 20.0, "activated_after": after}
    parts = {"load": load, "layers": [peaked("device_after", peak / 2)]}
    return record_of(method, [0] * wrong + RIGHT[wrong:], task=task, parts=parts)


def balance(method: str, straggler: float, on: str = "piqa", judged: str = "piqa") -> Balance:
    numbers = dict.fromkeys(("worst", "active", "active_fullest", "extra", "moved"), 0.0)
    of: Any = "prompts"
    return Balance(
        **{"model": "m", "ranks": 8, "planned_on": on, "judged_on": judged, "of": of, "steps": 9},
        **{"method": method, "straggler": straggler, "redirected": 0.0, "drop_rate": 0.0},
        **numbers,
    )


def evidence(balances: tuple[Balance, ...] = ()) -> FigureRecords:
    drop, ranks = create_method("score", 1.0, ep_size=1), create_method("score", 1.0, ep_size=8)
    oea, steps = (
        create_method("oea", k0=2),
        create_method("xshare", expert_budget=0.25, decode="only"),
    )
    records = {
        "stock": [found(STOCK, task, 0) for task in ("obqa", "piqa", "gsm8k")],
        "drop": [found(drop, "obqa", 4, 1.0, 20.0), found(drop, "piqa", 8, 1.5, 19.0)],
        "ranks": [found(ranks, "obqa", 2, 1.8), found(ranks, "piqa", 2, 2.2)],
        "oea": [found(oea, "obqa", 0, 5.0, 10.0), found(oea, "piqa", 1, 7.0, 12.0)],
        "half": [found(create_method("oea", k0=3), "obqa", 0, 5.0, 10.0)],
        "steps": [found(steps, "gsm8k", 30, 6.0, 5.0)],
    }
    return material.evidence({"models": {"m": "Mine"}, "balances": balances}, **records)


def test_a_point_is_what_its_records_say() -> None:
    measured = measure_comparators(evidence())
    questions, generation = measured.numbers["rows"]
    assert (questions["tasks"], generation["tasks"]) == (["OBQA", "PIQA"], ["GSM8K"])
    (model,) = questions["models"]
    drop, ranks, oea = model["points"]
    assert [p["line"] for p in model["points"]] == ["Token Drop", "Token Drop, each rank", "OEA"]
    assert drop["lost"] == pytest.approx(15) and ranks["lost"] == pytest.approx(5)
    lost = compare({"obqa": [100] * 4 + [0] * 36, "piqa": [100] * 8 + [0] * 32})
    assert (drop["low"], drop["high"]) == pytest.approx((lost.low, lost.high))
    assert drop["activated"] == pytest.approx(39 / 40) and oea["activated"] == pytest.approx(0.55)
    assert (drop["expert_peak"], oea["expert_peak"]) == (1.25, 6)
    # What was counted on one rank says nothing of ranks, nor an older record of activated experts.
    assert drop["rank_peak"] is None and oea["rank_peak"] is None and ranks["activated"] is None
    assert ranks["rank_peak"] == 1
    (step,) = generation["models"][0]["points"]
    assert (step["line"], step["lost"], step["activated"]) == ("XShare", 75, 0.25)
    assert "Mine, questions: OEA is left out: not every task is there." in measured.notes
    assert any("bench placement" in note for note in measured.notes)


def test_balancing_without_loss_is_a_line_across_the_ranks_alone() -> None:
    rows = (
        balance("contiguous", 2.0),
        balance("EPLB", 1.5),
        balance("EPLB+8", 1.1),
        balance("LPLB+8", 1.05),
        balance("EPLB+8", 1.7, on="winogrande"),  # a stale plan
        balance("EPLB+8", 1.2, on="winogrande", judged="winogrande"),  # none of the figure's tasks
    )
    measured = measure_comparators(evidence(rows))
    (model,) = measured.numbers["rows"][0]["models"]
    shown = {one["method"]: one["straggler"] for one in model["lossless"]}
    assert shown == {"contiguous": 2.0, "EPLB+8": 1.1, "LPLB+8": 1.05}
    assert "Balancing of questions was measured on PIQA." in measured.notes
    panels = draw_comparators(measured.numbers).axes
    upright = [
        [float(line.get_xdata()[0]) for line in axes.lines if list(line.get_ydata()) == [0, 1]]
        for axes in panels
    ]
    assert upright == [[], [], [2.0, 1.1, 1.05], [], [], []]


def test_many_models_are_drawn() -> None:
    models = [{"model": f"m{number}", "points": [], "lossless": []} for number in range(9)]
    figure = draw_comparators({"rows": [{"name": "questions", "tasks": [], "models": models}]})
    assert len(figure.legends[0].get_texts()) == 9
