"""Names of methods, models and capacity factors γ, in text, tables, pictures and files."""

import re
from pathlib import Path
from typing import Final

from capmoe_eval.routing.capacity import NO_LIMIT, CapacityFactor
from capmoe_eval.routing.registry import method_class, method_names, method_title

__all__ = ["NO_LIMIT", "method_title"]  # names of others, beside those of this module

BENCHMARKS: Final = Path("results/bench")
"""The folder that the benchmarks write to."""
NO_GAMMA: Final = "–"
"""γ of a method that has none."""
BITS_PER_BYTE: Final = "bits_per_byte"
"""lm-eval's metric of a text: the smaller the better, and no share."""
SHARES: Final = (
    *("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"),
    *("rouge1", "rouge2", "rougeL"),
)
"""Metrics that are shares, or means of shares, as ``pass@1`` is; others need only be finite."""
METRIC_TITLES: Final = {"score": "Score"}
"""The names of methods among the selection metrics, where Table 1 has another than the title."""


def metric_title(method: str) -> str:
    """Return a method's printed name among the selection metrics, as in Table 1."""
    return METRIC_TITLES.get(method, method_title(method))


def is_share(metric: str) -> bool:
    """Return whether a metric is a share, which text, tables and figures have in percent."""
    return metric in SHARES or metric.startswith(("pass@", "bertscore_"))


def gamma_text(gamma: float | CapacityFactor, *, decimal: bool = False) -> str:
    """Return γ for text: ``1``, or with a decimal ``1.0``, as the paper's tables print it."""
    factor = gamma if isinstance(gamma, CapacityFactor) else CapacityFactor(gamma)
    return factor.text(decimal=decimal)


def gamma_suffix(gamma: float | CapacityFactor | None, lead: str = " γ=") -> str:
    """Return γ after its lead, to follow a name; nothing for a method that has none."""
    return "" if gamma is None else lead + gamma_text(gamma)


def gamma_column(
    method: str, gamma: float | CapacityFactor | None, *, decimal: bool = False
) -> str:
    """Return γ for a column: +∞ where nothing is bounded, – where a method has none."""
    if is_stock(method):
        return NO_LIMIT
    return NO_GAMMA if gamma is None else gamma_text(gamma, decimal=decimal)


def is_stock(method: str) -> bool:
    """Return whether a method of this name changes nothing; False where no method has the name."""
    return method in method_names() and method_class(method).is_stock


_SEEDED: Final = re.compile(r"(.+)_s(?:eed)?(0|[1-9][0-9]{0,8})")
_IN_WORLD: Final = re.compile(r"(.+)_w(0|[1-9][0-9]{0,8})")


def split_seed(model: str) -> tuple[str, int | None]:
    """Return a model's name without its training seed, and the seed: "olmoe", 1 of "olmoe_s1"."""
    match = _SEEDED.fullmatch(model)
    return (match[1], int(match[2])) if match else (model, None)


def split_world(name: str) -> tuple[str, int | None]:
    """Return a name without the seed of its mini-world, and the seed: "olmoe", 8 of "olmoe_w8"."""
    match = _IN_WORLD.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def family(model: str) -> str:
    """Return a model's name without its training seed: ``zoo_olmoe`` of ``zoo_olmoe_s1``."""
    return split_seed(model)[0]


def base_name(model: str) -> str:
    """Return a model's name without its world and its training seed."""
    return split_world(family(model))[0]
