"""Methods and capacity factors as shown, and the filters of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT, method_title, metric_title
from capmoe_eval.routing.registry import method_names

GAMMA_ORDER: Final = {NO_LIMIT: 1e9, NO_GAMMA: -1}
"""The numbers that texts of γ without one sort by."""


def method_name(method: str) -> str:
    """Return the printed name of a method, behind its name as a selection metric if it has one."""
    title, metric = method_title(method), metric_title(method)
    return title if title == metric else f"{metric} ({title})"


def gamma_order(text: str) -> float:
    """Return the number that a text of γ sorts by: words come behind the numbers."""
    if text in GAMMA_ORDER:
        return float(GAMMA_ORDER[text])
    words, number = re.fullmatch(r"(\D*)(.*)", text).groups()  # type: ignore[union-attr]
    if words:  # such as adaptive0.05, by its budget
        return 1e6 + float(number) if number else 2e6
    return float(number)


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
    known = [name for name in method_names() if name in found]
    names = (*known, *sorted(found - set(known)))
    return Filter("method", "Method", {name: method_name(name) for name in names})


def gamma_filter(shown: Iterable[str]) -> Filter:
    """Return a choice among texts of γ, by their size."""
    said = {NO_LIMIT: f"{NO_LIMIT} (no limit)", NO_GAMMA: f"{NO_GAMMA} (none)"}
    found = sorted(set(shown), key=gamma_order)
    return Filter("gamma", "γ", {text: said.get(text, text) for text in found})
