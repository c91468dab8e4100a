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


HOLES = {
    "the second forward is not under the method": "the plan of a forward says what is checked",
    "the second forward counts as a decode step": "the plan of a forward says what is checked",
    "a gate has no groups": "decision and check read the scores by the same recipe",
    "a gate has a bias too many": "decision and check read the scores by the same recipe",
    "the token before an image is of it": "decision and check have the same images",
    "an image's last token is of text": "decision and check have the same images",
    "images are those of the sequence before": "decision and check have the same images",
    "images are text and text is images": "decision and check have the same images",
    "a token's parity tells its modality": "decision and check have the same images",
}
"""The mutations that no invariant refuses yet, and why."""
