"""How methods and capacity factors are offered in filters and sorted."""

from __future__ import annotations

from collections.abc import Iterable

from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT, SCORE, TITLES, method_title
from capmoe_eval.experiment.record import Record


def method_name(method: str) -> str:
    """Return the printed name of a method, Token Drop's as a metric before it."""
    title = method_title(method)
    return f"{SCORE} ({title})" if method == "score" else title


def gamma_order(shown: str) -> float:
    """Return a number by which texts of γ sort, and that a table sorts by."""
    if shown == NO_GAMMA:
        return -1.0
    return 1e9 if shown == NO_LIMIT else float(shown)


def knobs_text(record: Record) -> str:
    """Return the method's knobs beyond its name and γ in few words."""
    words = record.cell.label.split("-")[1:]
    return " ".join(word for word in words if not word.startswith("g") or word == "global")


def method_options(methods: Iterable[str]) -> dict[str, str]:
    """Return the choices of a filter by method."""
    found = set(methods)
    known = [name for name in TITLES if name in found]
    return {name: method_name(name) for name in (*known, *sorted(found - set(known)))}


def gamma_options(shown: Iterable[str]) -> dict[str, str]:
    """Return the choices of a filter by γ."""
    found = sorted(set(shown), key=gamma_order)
    said = {NO_LIMIT: f"{NO_LIMIT} (no limit)", NO_GAMMA: f"{NO_GAMMA} (none)"}
    return {text: said.get(text, text) for text in found}
