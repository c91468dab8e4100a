"""The data: its schema, and that every check in it can be read."""

from __future__ import annotations

import pytest

from capmoe_report.evidence import Evidence
from capmoe_report.judge import judge, read_claims

ENTRY = """
- id: one
  version: v2
  section: Abstract
  place: Abstract
  quote: some words
  kind: number
  published: {values: [0.2], unit: points}
  check: {none: {reason: because}}
"""


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        ("printed: {fact: averagos}", "fact 'averagos'"),
        ("printed: {fact: averages, wher: {}}", "wher"),
        ("printed: {fact: averages, where: {table: 77}}", "prints no row"),
        ("printed: {fact: relation, text: '', values: {a: rw(table=1)}}", "formula 'rw.*undefined"),
        ("load: {quantity: weight, above: 1}", "quantity.*not 'weight'"),
        ("load: {quantity: drop_rate}", "needs above, below"),
        (
            "measured: {contrasts: [{a: {method: score, gamma: 1}, expect: greater}]}",
            "b' is missing",
        ),
        (
            "measured: {contrasts: [{a: {method: scor}, b: {method: baseline}, expect: less}]}",
            "did you mean 'score'",
        ),
        (
            "measured: {contrasts: [{a: {method: baseline}, b: {method: baseline}, expect: more}]}",
            "expect: 'more'",
        ),
        (
            "measured: {contrasts: [{a: {method: baseline}, b: {method: baseline}, "
            "expect: {at_least: -generous}}]}",
            "margin 'generous' is none of comparable, ",
        ),
        ("agree: {with: two}", "two"),
        ("guess: {}", "check.*guess.*not 'guess'"),
        ("none: {}, load: {}", "check.*at most 1 item"),
    ],
)
def test_a_check_that_cannot_be_made_names_its_claim(check: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"claim one: .*{problem}"):
        judge(Evidence("zoo"), read_claims(ENTRY.replace("none: {reason: because}", check)))
