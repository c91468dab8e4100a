"""Methods and γ must be written the same everywhere."""

from __future__ import annotations

import math

from capmoe_eval.experiment import names
from capmoe_eval.experiment.names import TITLES, gamma_number, gamma_suffix, gamma_text
from capmoe_eval.paper.printed import printed_rows
from capmoe_eval.routing.factor import UniformFactor
from capmoe_eval.routing.registry import method_names


def test_every_method_has_a_title() -> None:
    assert set(TITLES) == set(method_names())


def test_every_printed_method_has_a_key() -> None:
    language = {row.method for row in printed_rows() if row.table in (1, 2, 3, 6, 11)}
    assert language <= set(names.METHODS)


def test_gamma_in_a_column() -> None:
    assert [gamma_text("baseline", None), gamma_text("score", math.inf)] == ["+∞", "+∞"]
    assert gamma_text("expert_drop", None) == "–"
    assert [gamma_text("score", 1.0), gamma_text("score", 1.0, decimal=True)] == ["1", "1.0"]


def test_gamma_in_a_sentence_and_in_a_file_name() -> None:
    assert [gamma_number(1.25), gamma_number(math.inf)] == ["1.25", "+∞"]
    assert [gamma_suffix(None), gamma_suffix(1.5), gamma_suffix(2.0, ", γ = ")] == [
        "",
        " γ=1.5",
        ", γ = 2",
    ]
    assert [UniformFactor(2.0).label, UniformFactor(math.inf).label] == ["g2", "ginf"]
