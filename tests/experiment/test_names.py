"""Methods and γ must be written the same everywhere."""

from __future__ import annotations

import math

from capmoe_eval.experiment.names import (
    gamma_column,
    gamma_suffix,
    gamma_text,
)
from capmoe_eval.routing.factor import UniformFactor


def test_gamma_in_a_column() -> None:
    assert [gamma_column("baseline", None), gamma_column("score", math.inf)] == ["+∞", "+∞"]
    assert gamma_column("expert_drop", None) == "–"
    assert [gamma_column("score", 1.0), gamma_column("score", 1.0, decimal=True)] == ["1", "1.0"]


def test_gamma_in_a_sentence_and_in_a_file_name() -> None:
    assert [gamma_text(1.25), gamma_text(math.inf)] == ["1.25", "+∞"]
    assert [gamma_suffix(None), gamma_suffix(1.5), gamma_suffix(2.0, ", γ = ")] == [
        "",
        " γ=1.5",
        ", γ = 2",
    ]
    assert [UniformFactor(2.0).label, UniformFactor(math.inf).label] == ["g2", "ginf"]
