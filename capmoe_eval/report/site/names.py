"""Methods and capacity factors as shown, and the filters of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from capmoe_eval.experiment.names import (
    BY_LAYER,
    NO_GAMMA,
    NO_LIMIT,
    SCORE,
    TITLES,
    method_title,
)

GAMMA_ORDER: Final = {NO_LIMIT: 1e9, NO_GAMMA: -1, BY_LAYER: 2e6}
"""The numbers that texts of γ without one sort by."""


def method_name(method: str) -> str:
    """Return the printed name of a method, Token Drop's as a metric before it."""
    title = method_title(method)
    return f"{SCORE} ({title})" if method == "score" else title


def gamma_order(shown: str) -> float:
    """Return the number that a text of γ sorts by."""
    if shown in GAMMA_ORDER:
        return GAMMA_ORDER[shown]
    keyword = shown.rstrip("0123456789.")  # such as adaptive0.05: behind the numbers, by budget
    return float(shown.removeprefix(keyword)) + (1e6 if keyword else 0)


@dataclass(frozen=True)
class Filter:
    """A choice among the rows of a page."""

    key: str  # rows are chosen by their data-<key>; those without it always stay
    label: str
    options: Mapping[str, str]  # value of data-<key> → what is shown


def name_filter(key: str, label: str, names: Iterable[str]) -> Filter:
    """Return a choice among names, in alphabetical order."""
    return Filter(key, label, {name: name for name in sorted(set(names))})


def method_filter(methods: Iterable[str]) -> Filter:
    """Return a choice among methods, in the order of their titles."""
    found = set(methods)
    known = [name for name in TITLES if name in found]
    names = (*known, *sorted(found - set(known)))
    return Filter("method", "Method", {name: method_name(name) for name in names})


def gamma_filter(shown: Iterable[str]) -> Filter:
    """Return a choice among texts of γ, by their size."""
    said = {NO_LIMIT: f"{NO_LIMIT} (no limit)", NO_GAMMA: f"{NO_GAMMA} (none)"}
    found = sorted(set(shown), key=gamma_order)
    return Filter("gamma", "γ", {text: said.get(text, text) for text in found})
