"""The checks of a method's knobs, for the command line, records and Python alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from capmoe_eval.errors import CAPACITY, FLAG, LARGEST, SHARE, Check, choice, whole

ADAPTIVE: Final = "adaptive"
"""The γ of the layers is chosen from recorded loads, under a budget of drops."""
CONTIGUOUS: Final = "contiguous"
"""Rank r holds the experts r·E/R, r·E/R + 1, …"""
EPLB: Final = "eplb"
"""The ranks hold the experts that EPLB gives them for recorded loads, without copies."""


def _number(rule: str, holds: Callable[[float], bool]) -> Check:
    """Return the rule of some numbers; true and false are none."""

    def is_one(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return (isinstance(value, float) or abs(value) <= LARGEST) and holds(value)

    return Check(f"must be {rule}", is_one)


def _are_factors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(CAPACITY.holds, value))


GAMMA = Check(
    f"{CAPACITY.rule}, or {ADAPTIVE} with a budget",
    lambda value: value == ADAPTIVE or CAPACITY.holds(value),
)
"""The check of gamma."""
KNOBS: dict[str, Check] = {
    "layer_gammas": Check(
        "must be a capacity factor for each MoE layer, for example layer_gammas=[1.0,1.5]",
        _are_factors,
    ).or_null("null for one gamma"),
    "budget": _number(
        "the share that may be dropped, between 0 and 1, for example budget=0.05",
        lambda value: 0 < value < 1,
    ).or_null("null without gamma=adaptive"),
    "budget_of": choice("pairs", "scores"),
    "ep_size": whole(1, LARGEST),
    "scope": choice("batch", "sequence"),
    "candidates": choice("local", "ranked", "global"),
    "m": whole(1, LARGEST),
    "protect_topk": FLAG,
    "max_k": FLAG,
    "rounds": whole(1, LARGEST),
    "granularity": choice("expert", "device"),
    "placement": choice(CONTIGUOUS, EPLB),
    "rounding": choice("ceil", "floor"),
    "count_padding": FLAG,
    "decode": choice("unconstrained", "constrained", "only"),
    "renormalize": choice("before", "after"),
    "modality": choice("uniform", "image_first", "text_first"),
    "seed": whole(0, 2**63 - 1),
    "k0": whole(0, LARGEST),
    "expert_budget": SHARE,
    "min_similarity": _number(
        "a number of at least 0 (above 1 no expert is similar enough), for example "
        "min_similarity=0.3",
        lambda value: value >= 0,
    ),
    "delta": _number(
        "a number of at least 0, for example delta=1.0", lambda value: 0 <= value < math.inf
    ),
    "rho": _number(
        "a number from 0 to 2, beyond which a capacity would be negative, for example rho=1.0",
        lambda value: 0 <= value <= 2,
    ),
    "modality_threshold": _number(
        "a share above 0.5, at most 1, for example modality_threshold=0.6",
        lambda value: 0.5 < value <= 1,
    ),
    "reroute": choice("local", "none"),
}
"""The check of each knob beside gamma."""
