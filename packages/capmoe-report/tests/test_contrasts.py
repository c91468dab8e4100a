"""Expectations of an effect as intervals, and margins computed again from the printed table."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_report.contrasts import Expectation, in_points, margins
from capmoe_report.verdicts import Finding, JudgedClaim, Outcome, VerdictFile


@given(st.sampled_from(["greater", "less"]) | st.floats(0.1, 5), st.floats(-9, 9), st.floats(0, 9))
def test_an_expectation_and_its_mirror_image_agree(
    raw: str | float, low: float, width: float
) -> None:
    mirrored = {"greater": "less", "less": "greater"}
    expect = Expectation.of({"at_least": -raw} if isinstance(raw, float) else raw)
    mirror = Expectation.of({"at_most": raw} if isinstance(raw, float) else mirrored[raw])
    high = low + width
    assert expect.judge(low, high) is mirror.judge(-high, -low)
    # A wider interval never decides what a narrower one left open.
    if expect.judge(low, high) is Outcome.UNDECIDED:
        assert expect.judge(low - 1, high + 1) is Outcome.UNDECIDED


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"within": 1, "at_least": 2}, "expect"),
        ({"at_least": "-generous"}, "margin 'generous' is none of comparable, "),
    ],
)
def test_an_expectation_that_cannot_be_is_refused(raw: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Expectation.of(raw)  # type: ignore[arg-type]


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
    assert {name: margin.points for name, margin in margins().items()} == pytest.approx(expected)
    assert in_points("-gain") == pytest.approx(-gain / 2)


def test_bounds_without_an_end_are_null_and_numbers_have_five_digits() -> None:
    finding = Finding(
        label="x",
        verdict=Outcome.HOLDS,
        effect=2.0000004,
        models={"m": 1.23456789},
        bounds=(-0.5, math.inf),
        wide=(0.25, 4.0),
        text="of the ledger",
    )
    claim = JudgedClaim(id="a", verdict="confirmed", contrasts=(finding,))
    text = VerdictFile(profile="zoo", claims=(claim,)).to_json()
    written = json.loads(text)["claims"][0]["contrasts"][0]
    expected = {"verdict": "confirmed", "effect": 2.0, "models": {"m": 1.23457}}
    expected |= {"bounds": [-0.5, None], "wide": [0.25, 4.0]}
    assert {key: written[key] for key in expected} == expected
    assert "text" not in written
    assert VerdictFile.model_validate_json(text).to_json() == text
