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
from tests.wrapper.mutations.settings import Setting

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


def mutations_of(setting: Setting) -> list[Mutation]:
    """Return the mutations that concern a setting."""
    return [mutation for mutation in MUTATIONS if mutation.concerns(setting)]
