"""Methods and capacity factors as shown, and the filters of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT, SCORE, TITLES, method_title


def method_name(method: str) -> str:
    """Return the printed name of a method, Token Drop's as a metric before it."""
    title = method_title(method)
    return f"{SCORE} ({title})" if method == "score" else title


def gamma_order(shown: str) -> float:
    """Return a number by which texts of γ sort, and that a table sorts by."""
    if shown == NO_GAMMA:
        return -1.0
    return 1e9 if shown == NO_LIMIT else float(shown)


@dataclass(frozen=True)
class Filter:
    """A choice among the rows of a page.

    Attributes:
        key: Rows are chosen by their ``data-<key>``; those without it always stay.
        label: The name of what is chosen.
        options: Value of ``data-<key>`` → what is shown.
    """

    key: str
    label: str
    options: Mapping[str, str]


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
