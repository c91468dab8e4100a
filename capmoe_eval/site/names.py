"""How methods and capacity factors are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from capmoe_eval.record import Record

METHODS: Final = MappingProxyType(
    {
        "baseline": "Baseline",
        "order": "Order",
        "reverse_order": "Reverse Order",
        "random": "Random",
        "score": "Score (Token Drop)",
        "expert_drop": "Expert Drop",
        "expanded_drop": "Expanded Drop",
        "token_reroute": "Token Reroute",
    }
)
"""Printed names, in the order in which they are offered."""

_NO_GAMMA: Final = {"baseline": "+∞"}


def method_name(method: str) -> str:
    """Return the printed name of a method."""
    return METHODS.get(method, method)


def gamma_text(method: str, gamma: float | None) -> str:
    """Return γ as tables print it: +∞ where nothing is bounded, – where there is none."""
    if gamma is None:
        return _NO_GAMMA.get(method, "–")
    return "+∞" if gamma == math.inf else f"{gamma:g}"


def gamma_order(shown: str) -> float:
    """Return a number by which texts of γ sort, and that a table sorts by."""
    if shown == "–":
        return -1.0
    return 1e9 if shown == "+∞" else float(shown)


def knobs_text(record: Record) -> str:
    """Return the method's knobs beyond its name and γ in few words."""
    words = record.cell.label.split("-")[1:]
    return " ".join(word for word in words if not word.startswith("g") or word == "global")


def method_options(methods: Iterable[str]) -> dict[str, str]:
    """Return the choices of a filter by method."""
    found = set(methods)
    known = [name for name in METHODS if name in found]
    return {name: method_name(name) for name in (*known, *sorted(found - set(known)))}


def gamma_options(shown: Iterable[str]) -> dict[str, str]:
    """Return the choices of a filter by γ."""
    found = sorted(set(shown), key=gamma_order)
    return {text: {"+∞": "+∞ (no limit)", "–": "– (none)"}.get(text, text) for text in found}
