"""Count on the pairs of a trace what loads do not tell.

These are the gate scores that a capacity would drop, by who is kept, and the copies of experts that
still compute.
"""

from __future__ import annotations

import numpy as np

from capmoe_serve.trace import Array

# Shape suffixes: T tokens of some steps, K = top-k, S steps, E experts, B = S·E buckets,
# P = T·K pairs, X capacity factors, M keepers.

KEEPERS = ("score", "order", "random")
"""Who is kept: the highest scores, the first tokens, or anyone (then the expectation)."""


def dropped_mass(
    expert_TK: Array, score_TK: Array, load_SE: Array, limit_XS: Array
) -> tuple[float, Array]:
    """Return the scores of one layer's pairs, summed, and what of it is dropped [X, M].

    Args:
        expert_TK: Experts of the tokens, step by step.
        score_TK: Their gate scores.
        load_SE: Pairs of each expert in each step, which are those of ``expert_TK``.
        limit_XS: The capacity of an expert in each step, by capacity factor.
    """
    n_steps, n_experts = load_SE.shape
    top_k = expert_TK.shape[1]
    step_T = np.repeat(np.arange(n_steps), load_SE.sum(axis=1) // top_k)
    bucket_P = (step_T[:, None] * n_experts + expert_TK).ravel().astype(np.uint64) << np.uint64(32)
    score_P = score_TK.astype(np.float32).ravel()
    load_B = load_SE.ravel()
    end_B = np.cumsum(load_B)
    # One sort of integers: the bucket above, below it what falls with the score, or the place of
    # the pair, which rises with the token.
    falling_P = np.uint32(2**32 - 1) - np.sort(bucket_P | _falling(score_P)).astype(np.uint32)
    placed_P = np.sort(bucket_P | np.arange(len(score_P), dtype=np.uint64)).astype(np.uint32)
    lost_XM = np.empty((len(limit_XS), len(KEEPERS)))
    sums = [_running(falling_P.view(np.float32)), _running(score_P[placed_P])]
    mass_B = sums[1][end_B] - sums[1][end_B - load_B]
    for number, limit_S in enumerate(limit_XS):
        kept_B = np.minimum(load_B, np.repeat(limit_S, n_experts))
        first_dropped_B = end_B - load_B + kept_B
        lost_XM[number, :2] = [(sum_P[end_B] - sum_P[first_dropped_B]).sum() for sum_P in sums]
        lost_XM[number, 2] = (mass_B * (load_B - kept_B) / np.maximum(load_B, 1)).sum()
    return float(sums[1][-1]), lost_XM


def _falling(score: Array) -> Array:
    """Return 32 bits of each score [P] that fall where it rises, as uint64."""
    bits_P = (score.astype(np.float32).ravel() + np.float32(0)).view(np.uint32)  # makes 0 of -0
    return np.uint64(2**32 - 1) - bits_P  # bits of floats of at least 0 are in their order


def _running(score_P: Array) -> Array:
    """Return the sums of the first 0, 1, … scores."""
    return np.concatenate([[0.0], np.cumsum(score_P, dtype=np.float64)])


def active_copies(
    slot_TK: Array, score_TK: Array | None, load_SR: Array, limit_XS: Array, slots: int
) -> Array:
    """Return the copies of experts that keep a pair under capacities of devices [X].

    They are summed over the steps of one layer.

    Args:
        slot_TK: The slots that compute the pairs of the tokens, step by step.
        score_TK: Their gate scores, of which a device keeps the highest, of equal ones the first;
            None to keep the first pairs.
        load_SR: Pairs of each device in each step.
        limit_XS: The capacity of a device in each step, by capacity factor.
        slots: Slots of a device.
    """
    n_steps, n_ranks = load_SR.shape
    step_P = np.repeat(np.arange(n_steps), load_SR.sum(axis=1))
    slot_P, bucket_P = slot_TK.ravel(), step_P * n_ranks + slot_TK.ravel() // slots
    bucket_P = bucket_P.astype(np.min_scalar_type(load_SR.size))  # short integers sort faster
    order_P: Array
    if score_TK is None:
        order_P = np.argsort(bucket_P, kind="stable")
    else:
        number_P: Array = np.arange(len(slot_P), dtype=np.uint64)
        falling_P = np.sort(_falling(score_TK) << np.uint64(32) | number_P).astype(np.uint32)
        order_P = falling_P[np.argsort(bucket_P[falling_P], kind="stable")]
    load_B = load_SR.ravel()
    place_P = np.arange(len(order_P)) - np.repeat(load_B.cumsum() - load_B, load_B)
    # A copy computes if the first of its pairs is kept; one without a pair never does. Places rise,
    # so that of a copy's places the first is written last.
    first_SN = np.full((n_steps, n_ranks * slots), np.iinfo(np.int64).max)
    copy_P = step_P * (n_ranks * slots) + slot_P
    first_SN.ravel()[copy_P[order_P[::-1]]] = place_P[::-1]
    active_X: Array = np.count_nonzero(first_SN < limit_XS[:, :, None], axis=(1, 2))
    return active_X
