"""The figure of adaptive factors, from records whose straggler factors and scores are known."""

from __future__ import annotations

from typing import Any

import pytest

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.adaptive import draw_adaptive, measure_adaptive
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.routing.registry import create_method
from tests.records import calibrated, record_of
from tests.report.figures import material
from tests.report.figures.material import peaked


def found(
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


@pytest.fixture(scope="module")
def evidence() -> FigureRecords:
    static, adaptive = [], []
    for model, gain in (("m", 0.1), ("n", 0.3)):
        static += [
            found(model, 1.0, None, 0.4, 1.0, 8),
            found(model, 2.0, None, 0.2, 2.0, 4),
            found(model, 3.0, None, 0.1, 3.0, 0),
        ]
        adaptive += [found(model, None, 0.1, 0.3, 1.5 - gain, 8)]
    titles = {"models": {"m": "Mine", "n": "Nine"}}
    return material.evidence(titles, static=static, adaptive=adaptive)


def test_the_numbers_are_those_of_the_records(evidence: FigureRecords) -> None:
    measured = measure_adaptive(evidence)
    mine, _ = measured.numbers["models"]
    assert [point["gamma"] for point in mine["static"]] == [1.0, 2.0, 3.0]
    assert [(p["budget"], p["straggler"]) for p in mine["adaptive"]] == [(0.1, pytest.approx(1.4))]
    one, every = measured.numbers["budgets"]
    assert (one["budget"], every["budget"]) == (0.1, None)
    # The static γ between 1 and 2 with 30 % of drops has 1.5; with t over two models.
    ends = {"mean": -0.2, "low": -0.2 - 1.2706, "high": -0.2 + 1.2706}
    assert every["straggler"] == pytest.approx(ends, abs=1e-3)
    assert every["straggler_of_models"] == pytest.approx({"Mine": -0.1, "Nine": -0.3})
    # At 1.4 and 1.2 static factors would have 6.4 and 7.2 of 40 wrong; 8 are.
    assert every["points_of_models"] == pytest.approx({"Mine": -4.0, "Nine": -2.0})
    # At 0.3 the line through 0.1 and 0.2, drawn on, is at 1.
    assert "no gain is shown" in measured.notes[0] and "+0.300" in measured.notes[1]


def test_every_number_is_drawn(evidence: FigureRecords) -> None:
    curve, middle, right = draw_adaptive(measure_adaptive(evidence).numbers).axes
    drawn = {(x, y) for line in curve.lines for x, y in zip(*line.get_data(), strict=True)}
    assert {(40.0, 1.0), (20.0, 2.0), (10.0, 3.0), (30.0, 1.4)} <= {
        (round(x, 9), round(y, 9)) for x, y in drawn
    }
    for axes, mean in ((middle, -0.2), (right, -3.0)):
        (container,) = axes.containers
        assert list(container[0].get_ydata()) == pytest.approx([mean, mean])
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["10", "all"]
