"""Thresholds beside simulations of the routers that they are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from capmoe_eval.experiment.data_file import read_data

from capmoe_report.measures import Question
from capmoe_report.nulls import noise_step, uniform_bound


def uniform_group(
    rng: np.random.Generator, experts: int, top_k: int, tokens: int
) -> dict[str, float]:
    """One capacity group of a router that chooses distinct experts, token by token."""
    loads = np.zeros(experts, int)
    for _ in range(tokens):
        loads[rng.choice(experts, top_k, replace=False)] += 1
    slots = math.ceil(tokens * top_k / experts)
    kept = sum(min(int(load), slots) for load in loads)
    mean = tokens * top_k / experts
    return {
        "pad_waste": 1 - kept / (slots * experts),
        "mean_peak_before": float(loads.max()) / mean,
    }


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 60), (32, 4, 60), (32, 2, 200)])
def test_a_uniform_router_exceeds_its_bound_in_one_of_twenty_groups(
    experts: int, top_k: int, tokens: int
) -> None:
    rng = np.random.default_rng(8)
    groups = [uniform_group(rng, experts, top_k, tokens) for _ in range(400)]
    for quantity in ("pad_waste", "mean_peak_before"):
        bound = uniform_bound(quantity, experts, top_k, tokens * top_k / experts)  # type: ignore[arg-type]
        beyond = np.mean([group[quantity] > bound for group in groups])
        # Three standard errors of 5 % of 400 are 3.3 %; loads are discrete, so fewer may be beyond.
        assert beyond <= 0.05 + 0.033
        at_least = np.mean([group[quantity] >= 0.95 * bound for group in groups])
        assert at_least > 0.05


def gate_step(rng: np.random.Generator, experts: int, top_k: int, spread: float) -> float:
    """The step behind the top-k over that of noise, of four layers with random linear gates."""
    steps, inside = [], []
    for _ in range(4):
        gate = rng.standard_normal((64, experts)) / 8
        logits = spread * rng.standard_normal((500, 64)) @ gate
        scores = np.exp(-np.sort(-logits, axis=1))
        mean = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
        steps.append(math.log(mean[top_k - 1] / mean[top_k]))
        inside.append(math.log(mean[0] / mean[top_k - 1]) / (top_k - 1))
    return float(np.mean(steps)) / noise_step(experts, top_k, round(float(np.mean(inside)), 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "top_k", "spread"), [(8, 2, 1.0), (32, 4, 1.0), (64, 8, 2.0), (60, 4, 0.5)]
)
def test_random_gates_are_hardly_ever_flatter_than_the_threshold(
    experts: int, top_k: int, spread: float
) -> None:
    (question,) = read_data("capmoe_report", "data/measures.yaml", dict[str, tuple[Question, ...]])[
        "decay"
    ]
    rng = np.random.default_rng(9)
    ratios = [gate_step(rng, experts, top_k, spread) for _ in range(100)]
    assert np.mean([ratio < question.below for ratio in ratios]) <= 0.05
    # The threshold is no lower than these simulations ask: nine tenths of that of before is.
    if experts == 64:
        assert np.mean([ratio < question.below + 0.04 for ratio in ratios]) > 0.05
    # The question of before, if the score of rank k+1 is above half of rank k's: noise has it, too.
    assert math.exp(-noise_step(experts, top_k, 0.3)) > 0.5
