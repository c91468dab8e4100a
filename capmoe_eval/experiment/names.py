"""Names of methods, models and capacity factors γ, in text, tables, pictures and files."""

from __future__ import annotations

import math
import re
from typing import Final

from capmoe_eval.routing.knobs import ADAPTIVE
from capmoe_eval.routing.method import Adaptive, Factor

TITLES: Final = {
    "baseline": "Baseline",
    "order": "Order",
    "reverse_order": "Reverse Order",
    "random": "Random",
    "score": "Token Drop",
    "expert_drop": "Expert Drop",
    "expanded_drop": "Expanded Drop",
    "token_reroute": "Token Reroute",
    "device_drop": "device-level Token Drop",
    "oea": "OEA",
    "xshare": "XShare",
    "sere": "SERE",
    "macs": "MACS",
}
"""Their papers' names of methods by key, in the order in which they are offered."""
SCORE: Final = "Score"
"""Token Drop among the selection metrics, as in Table 1."""
METHODS: Final = {title: key for key, title in TITLES.items()} | {SCORE: "score"}
"""Keys of the methods by their printed names."""

NO_LIMIT: Final = "+∞"
"""γ without a capacity limit."""
NO_GAMMA: Final = "–"
"""γ of a method that has none."""
BY_LAYER: Final = "by layer"
"""γ of a method that was given one for each layer."""


def method_title(method: str) -> str:
    """Return a method's printed name, or its key where it has none."""
    return TITLES.get(method, method)


def gamma_number(gamma: Factor, *, decimal: bool = False) -> str:
    """Return γ as a number: ``1``, or with a decimal ``1.0``, as the paper's tables print it.

    One that is chosen for each layer is ``adaptive0.05``, with its budget.
    """
    if isinstance(gamma, Adaptive):
        return f"{ADAPTIVE}{gamma.budget:g}"
    if isinstance(gamma, tuple):
        return BY_LAYER
    if gamma == math.inf:
        return NO_LIMIT
    return str(float(gamma)) if decimal else f"{gamma:g}"


def gamma_text(method: str, gamma: Factor | None, *, decimal: bool = False) -> str:
    """Return γ for a column: +∞ where nothing is bounded, – where a method has none."""
    if method == "baseline":
        return NO_LIMIT
    return NO_GAMMA if gamma is None else gamma_number(gamma, decimal=decimal)


def gamma_suffix(gamma: Factor | None, lead: str = " γ=") -> str:
    """Return γ after its lead, to follow a name; nothing for a method that has none."""
    return "" if gamma is None else lead + gamma_number(gamma)


def gamma_label(gamma: Factor) -> str:
    """Return γ in a few characters that are fit for a file name."""
    if isinstance(gamma, tuple):
        return gamma_number(gamma).replace(" ", "_")
    return "ginf" if gamma == math.inf else f"g{gamma:g}"


_SEEDED: Final = re.compile(r"(.+)_s(?:eed)?(0|[1-9][0-9]{0,8})")


def split_seed(model: str) -> tuple[str, int | None]:
    """Return a model's name without its training seed, and the seed: "olmoe", 1 of "olmoe_s1"."""
    found = _SEEDED.fullmatch(model)
    return (found[1], int(found[2])) if found else (model, None)


def family(model: str) -> str:
    """Return a model's name without its training seed: ``zoo_olmoe`` of ``zoo_olmoe_s1``."""
    return split_seed(model)[0]
