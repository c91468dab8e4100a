"""What the figures of records show, against numbers worked out by hand or by a slow loop."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures import routing, scores
from capmoe_eval.report.figures.routing import pooled_grid
from capmoe_eval.routing.registry import create_method
from tests.records import layer
from tests.report.figures.material import BASELINE, cell, evidence, record, values


def test_figure_8_needs_scores_by_rank() -> None:
    """The golden file of figures has its numbers."""
    with pytest.raises(UsageError, match="fig8: Mine: no scores by rank in the records of obqa"):
        routing.scores_by_rank(evidence(routing=[record(cell(BASELINE))]))


def of_curve(gamma: float, task: str, value: float, model: str = "mine", **parts: Any) -> Record:
    method = create_method("score", gamma)
    rate = gamma / 10
    return record(cell(method, task, model=model), value=value, drop_rate=rate, **parts)


def test_figure_12_means_only_what_is_complete() -> None:
    curve = [of_curve(g, t, v, stderr=0.03) for g, t, v in ((1, "a", 0.5), (1, "b", 0.75))]
    curve.append(of_curve(2, "a", 0.6))
    unlimited = [record(cell(BASELINE, task), value=0.8) for task in "ab"]
    shown = evidence(curve=curve, unlimited=unlimited)
    rows = scores.curves(shown)
    assert values(rows, "task", "gamma", "score")["A"] == [(1.0, 50.0), (2.0, 60.0)]
    (mean,) = rows[rows["task"] == "mean"].to_dict("records")
    assert (mean["gamma"], mean["score"], mean["dropped_percent"]) == (1.0, 62.5, 10)
    assert mean["score_high"] - 62.5 == pytest.approx(1.96 * 100 * (2 * 0.03**2) ** 0.5 / 2)
    assert values(rows, "task", "score")["mean, no limit"] == pytest.approx([80])
    assert shown.notes == ["No mean over tasks of Mine at γ=2: B missing."]


loads = st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any)


def of_layers(many: list[list[int]]) -> pd.DataFrame:
    layers = [layer(load, top_k=1) for load in many]
    names = {f"grid.{name}": name for name in ("gamma", "drop_rate", "pad_waste")}
    rows = [{name: each["grid"][field] for name, field in names.items()} for each in layers]
    return pooled_grid(pd.DataFrame(rows).assign(assignments=[sum(load) for load in many]))


@given(st.lists(loads, min_size=1, max_size=4))
def test_pooling_shares_is_summing_counts(many: list[list[int]]) -> None:
    grid = of_layers(many)
    for gamma, drop, empty in grid.itertuples(index=False):
        dropped_pairs = unused = slots = 0
        for load in many:
            capacity = -int(-gamma * sum(load) / 4 // 1)
            dropped_pairs += sum(max(n - capacity, 0) for n in load)
            unused += sum(max(capacity - n, 0) for n in load)
            slots += 4 * capacity
        assert drop == pytest.approx(dropped_pairs / sum(map(sum, many)))
        assert empty == pytest.approx(unused / slots if slots else np.nan, nan_ok=True)
