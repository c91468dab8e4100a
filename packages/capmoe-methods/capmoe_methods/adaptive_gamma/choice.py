"""Choose a capacity factor for every layer under one budget of drops.

A layer at capacity factor γ drops a share d of its pairs, and its fullest expert (or device) has s
times the mean load. Over the grid of γ, a layer is a set of points (d, s). One point for each layer
is chosen so that the sum of s is smallest while the mean of d is within the budget: a
multiple-choice knapsack; the tests define it by trying every choice.

:func:`choose` takes steps on each layer's lower convex hull, from the point that drops least. The
next step is always the one, in any layer, that gains most of s for each d, until a step does not
fit (Sinha and Zoltners 1979; Lagrange multipliers give the same points). It reaches the best choice
wherever the budget is used up to a step, never exceeds the budget, and with a larger budget no
layer's γ rises.
"""

import itertools
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

# Shape suffixes: L layers, X capacity factors.

SLACK = 1e-12
"""Rounding by which a sum of shares may exceed the budget."""


def grid(top: float) -> tuple[float, ...]:
    """Return the capacity factors to choose from: 0.05, 0.1, … 2, then 2.25, 2.5, … up to ``top``.

    ``top`` is one at which nothing is dropped, E/K of an expert's capacity, R of a device's.
    """
    fine = [step / 20 for step in range(1, 41)]
    coarse = [2 + step / 4 for step in range(1, int(np.ceil(max(top - 2, 0) * 4)) + 1)]
    below = [gamma for gamma in (*fine, *coarse) if gamma < top]
    return (*below, float(top))


def choose(dropped_LX: Array, straggler_LX: Array, budget: float) -> list[int]:
    """Return the place in the grid for each layer: steps on the hulls while the budget lasts.

    The budget is the largest mean of the shares that the layers drop.
    """
    hulls = [hull(*layer) for layer in zip(dropped_LX, straggler_LX, strict=True)]
    chosen = [points[0] for points in hulls]
    steps = []  # on a hull the gains fall, so that a layer's steps come in their order
    for layer, points in enumerate(hulls):
        for start, end in itertools.pairwise(points):
            cost = dropped_LX[layer, end] - dropped_LX[layer, start]
            gain = straggler_LX[layer, start] - straggler_LX[layer, end]
            steps.append((-gain / cost, layer, cost, end))
    dropped = sum(dropped_LX[layer, x] for layer, x in enumerate(chosen))
    for _, layer, cost, end in sorted(steps):
        dropped += cost
        if dropped > budget * len(hulls) + SLACK:
            break
        chosen[layer] = end
    return chosen


def hull(dropped_X: Array, straggler_X: Array) -> list[int]:
    """Return the places of the points of a layer's lower convex hull, from the fewest drops.

    It ends at the smallest straggler factor: beyond, a drop gains nothing. Of equal points it has
    that of the largest γ, which the loads of other documents can exceed least.
    """
    order = sorted(range(len(dropped_X)), key=lambda x: (dropped_X[x], straggler_X[x], -x))
    places: list[int] = []
    for x in order:
        if places and straggler_X[x] >= straggler_X[places[-1]]:
            continue  # no better for as many drops or more
        while len(places) > 1 and not _convex(dropped_X, straggler_X, places[-2], places[-1], x):
            places.pop()
        places.append(x)
    return places


def _convex(dropped_X: Array, straggler_X: Array, first: int, middle: int, last: int) -> bool:
    """Return whether the gain per drop falls from the first step to the second."""
    before = (straggler_X[first] - straggler_X[middle]) * (dropped_X[last] - dropped_X[middle])
    after = (straggler_X[middle] - straggler_X[last]) * (dropped_X[middle] - dropped_X[first])
    return bool(before > after)
