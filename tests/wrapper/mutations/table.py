"""All mutations."""

from __future__ import annotations

from tests.wrapper.mutations import (
    activation,
    candidates,
    capacities,
    forwards,
    macs,
    order,
    pairs,
    weights,
)
from tests.wrapper.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *capacities.MUTATIONS,
    *order.MUTATIONS,
    *candidates.MUTATIONS,
    *pairs.MUTATIONS,
    *weights.MUTATIONS,
    *forwards.MUTATIONS,
    *activation.MUTATIONS,
    *macs.MUTATIONS,
)
