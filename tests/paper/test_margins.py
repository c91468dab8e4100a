"""Margins, computed again from the printed table alone."""

from __future__ import annotations

import csv
from collections import defaultdict
from importlib import resources

import pytest

from capmoe_eval.paper.margins import in_points, margins

Rows = dict[tuple[str, ...], dict[str, float]]


@pytest.fixture(scope="module")
def means() -> dict[tuple[str, ...], float]:
    """The mean over tasks of every row of Tables 1 and 2 of v2."""
    rows: dict[tuple[str, ...], list[float]] = defaultdict(list)
    file = resources.files("capmoe_eval.paper") / "data" / "tables.csv"
    for cell in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        if cell["version"] == "v2" and cell["table"] in ("1", "2") and cell["column"] != "Avg.":
            name = cell["table"], cell["model"], cell["method"], cell["gamma"]
            rows[name].append(float(cell["value"]))
    return {name: sum(values) / len(values) for name, values in rows.items()}


def test_margins_follow_from_printed_effects(means: dict[tuple[str, ...], float]) -> None:
    table1 = {name[2:]: mean for name, mean in means.items() if name[0] == "1"}
    table2 = {name[1:3]: mean for name, mean in means.items() if name[0] == "2"}
    models = {model for model, _ in table2}
    assert len(models) == 4
    lost = table1["Baseline", "inf"] - table1["Score", "1.5"]
    assert round(lost, 1) == 0.9  # "with only 0.9% degradation on OLMoE"
    gain, worse = (
        min(table2[model, first] - table2[model, second] for model in models)
        for first, second in (("Expanded Drop", "Token Drop"), ("Token Drop", "Expert Drop"))
    )
    keep = min(table1["Score", g] - table1["Random", g] for g in ("1.0", "1.5", "2.0"))
    asked = {"comparable": lost, "gain": gain / 2, "large_keep": keep / 2, "large_skip": worse / 2}
    asked["little"] = 68.7 - 64.9  # Table 9, Overall
    asked["consistent"] = 22.6 - 21.4  # Table 7, NQ, Qwen1.5-MoE-Chat; its fractions in percent
    assert {name: margin.points for name, margin in margins().items()} == pytest.approx(asked)
    assert in_points("-gain") == -in_points("gain") == pytest.approx(-gain / 2)


def test_a_margin_names_the_cells_that_it_is_from() -> None:
    assert margins()["comparable"].source == ("Table 1 OLMoE Score γ=1.5 63.08 − Baseline 63.96")
    assert margins()["gain"].source.startswith("0.5 × (Table 2 Qwen1.5-MoE-Chat Expanded Drop")
