"""Margins computed again from the printed table."""

from __future__ import annotations

import csv
from collections import defaultdict
from importlib import resources

import pytest

from capmoe_report.margins import in_points, margins


def test_margins_follow_from_printed_effects() -> None:
    rows: dict[tuple[str, ...], list[float]] = defaultdict(list)
    file = resources.files("capmoe_eval.paper") / "data" / "tables.csv"
    for cell in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        if cell["version"] == "v2" and cell["table"] in ("1", "2") and cell["column"] != "Avg.":
            name = cell["table"], cell["model"], cell["method"], cell["gamma"]
            rows[name].append(float(cell["value"]))
    means = {name: sum(values) / len(values) for name, values in rows.items()}
    table1 = {name[2:]: mean for name, mean in means.items() if name[0] == "1"}
    table2 = {name[1:3]: mean for name, mean in means.items() if name[0] == "2"}
    models = {model for model, _ in table2}
    lost = table1["Baseline", "inf"] - table1["Score", "1.5"]
    assert round(lost, 1) == 0.9  # "with only 0.9% degradation on OLMoE"
    gain, worse = (
        min(table2[model, first] - table2[model, second] for model in models)
        for first, second in (("Expanded Drop", "Token Drop"), ("Token Drop", "Expert Drop"))
    )
    keep = min(table1["Score", g] - table1["Random", g] for g in ("1.0", "1.5", "2.0"))
    expected = {"comparable": lost, "gain": gain / 2, "large_keep": keep / 2}
    expected |= {"large_skip": worse / 2}
    expected["little"] = 68.7 - 64.9  # Table 9, Overall
    expected["consistent"] = 22.6 - 21.4  # Table 7, NQ, Qwen1.5-MoE-Chat; fractions in percent
    assert {name: margin["points"] for name, margin in margins().items()} == pytest.approx(expected)
    assert in_points("-gain") == pytest.approx(-gain / 2)
    assert in_points("comparable") == 0.8875  # to the bit: Python 3.12 adds otherwise
