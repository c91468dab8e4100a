"""Names of methods, models and capacity factors γ, in text, tables, pictures and files."""

from __future__ import annotations

import re
from typing import Final

from capmoe_eval.routing.factor import NO_LIMIT, CapacityFactor, parse_factor
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import method_class, method_names, method_title

__all__ = ["NO_LIMIT", "method_title"]  # names of others, beside those of this module

TITLES: Final = {name: method_class(name).title for name in method_names()}
"""The printed names of methods by key, in the order in which they are offered."""
SCORE: Final = "Score"
"""Token Drop among the selection metrics, as in Table 1."""
METHODS: Final = {title: key for key, title in TITLES.items()} | {SCORE: "score"}
"""Keys of the methods by their printed names."""

NO_GAMMA: Final = "–"
"""γ of a method that has none."""
BY_LAYER: Final = "by layer"
"""γ of a method that was given one for each layer."""


def gamma_number(gamma: float | CapacityFactor, *, decimal: bool = False) -> str:
    """Return γ as a number: ``1``, or with a decimal ``1.0``, as the paper's tables print it."""
    factor = parse_factor(gamma)
    assert factor is not None
    return factor.text(decimal=decimal)


def gamma_text(method: str, gamma: float | CapacityFactor | None, *, decimal: bool = False) -> str:
    """Return γ for a column: +∞ where nothing is bounded, – where a method has none."""
    if method_class(method).is_stock:
        return NO_LIMIT
    return NO_GAMMA if gamma is None else gamma_number(gamma, decimal=decimal)


def uniform_gamma(method: Method) -> float | None:
    """Return a method's γ; None where it has none, or one for each layer."""
    return None if method.factor is None else method.factor.uniform


def gamma_suffix(gamma: float | CapacityFactor | None, lead: str = " γ=") -> str:
    """Return γ after its lead, to follow a name; nothing for a method that has none."""
    return "" if gamma is None else lead + gamma_number(gamma)


_SEEDED: Final = re.compile(r"(.+)_s(?:eed)?(0|[1-9][0-9]{0,8})")


def split_seed(model: str) -> tuple[str, int | None]:
    """Return a model's name without its training seed, and the seed: "olmoe", 1 of "olmoe_s1"."""
    found = _SEEDED.fullmatch(model)
    return (found[1], int(found[2])) if found else (model, None)


def family(model: str) -> str:
    """Return a model's name without its training seed: ``zoo_olmoe`` of ``zoo_olmoe_s1``."""
    return split_seed(model)[0]
