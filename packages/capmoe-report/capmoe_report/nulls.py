"""Routers that know nothing, and what they exceed in 5 % of simulations."""

from __future__ import annotations

import math
from functools import cache
from typing import Final, Literal

import numpy as np

from capmoe_report.verdicts import LEVEL

_SIMULATIONS: Final = 2000


@cache
def noise_step(experts: int, top_k: int, fall: float) -> float:
    """Return the step behind the top-k of a router whose logits are Gaussian noise, seeded.

    The noise's spread is that with which the mean step inside the top-k is ``fall``.
    """
    logits = np.random.default_rng(20260103).standard_normal((4096, experts))  # of as many tokens
    ranked = -np.sort(-logits, axis=1)
    below = ranked - ranked[:, :1]

    def steps(spread: float) -> tuple[float, float]:
        scores = np.exp(spread * below)
        shares = scores[:, [0, top_k - 1, top_k]] / scores.sum(axis=1, keepdims=True)
        first, last, behind = shares.mean(axis=0)
        return math.log(first / last) / (top_k - 1), math.log(last / behind)

    low, high = 0.0, 50.0  # the step inside grows with the spread; scipy.optimize imports slowly
    while high - low > 1e-6:
        spread = (low + high) / 2
        low, high = (spread, high) if steps(spread)[0] < fall else (low, spread)
    return steps(high)[1]


@cache
def uniform_bound(
    quantity: Literal["pad_waste", "mean_peak_before"],
    experts: int,
    top_k: int,
    mean_load: float,
) -> float:
    """Return what a uniform router exceeds in 5 % of simulated capacity groups, seeded.

    Each token chooses distinct experts, all with equal probability.

    Args:
        quantity: The share of empty slots at γ=1, or the highest load over the mean load.
        experts: Their number.
        top_k: The experts of a token.
        mean_load: Tokens of an expert in a group, in the mean.
    """
    tokens, rng = max(1, round(mean_load * experts / top_k)), np.random.default_rng(20260104)
    mean = tokens * top_k / experts
    pairs = rng.multinomial(tokens * top_k, np.full(experts, 1 / experts), _SIMULATIONS)
    # A token's experts are distinct: loads vary less than those of pairs drawn one by one.
    narrower = math.sqrt((experts - top_k) / (experts - 1)) if experts > 1 else 1.0
    loads = mean + narrower * (pairs - mean)
    if quantity == "pad_waste":
        slots = math.ceil(mean)
        values = 1 - np.minimum(loads, slots).mean(axis=1) / slots
    else:
        values = loads.max(axis=1) / mean
    return float(np.quantile(values, 1 - LEVEL))
