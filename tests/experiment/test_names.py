"""Methods and γ must be written the same everywhere."""

from __future__ import annotations

import math

from capmoe_eval.experiment.names import (
    METRIC_TITLES,
    gamma_column,
    gamma_suffix,
    gamma_text,
    is_stock,
    method_title,
    metric_title,
)
from capmoe_eval.paper.printed import printed_rows
from capmoe_eval.routing.factor import UniformFactor
from capmoe_eval.routing.registry import method_names


def test_every_method_has_a_title_of_its_own() -> None:
    assert len({method_title(name) for name in method_names()}) == len(method_names())
    assert set(METRIC_TITLES) <= set(method_names())


def test_every_printed_method_has_a_key() -> None:
    language = {row.method for row in printed_rows() if row.table in (1, 2, 3, 6, 11)}
    titles = {title(name) for name in method_names() for title in (method_title, metric_title)}
    assert language <= titles


def test_a_method_that_is_not_registered_has_its_key_for_a_title() -> None:
    assert [method_title("mine"), metric_title("mine")] == ["mine", "mine"]
    assert not is_stock("mine")
    assert is_stock("baseline")
    assert not is_stock("score")
    assert gamma_column("mine", 1.0) == "1"


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
