"""Keep the best pairs of every bucket: the routine that all bounded methods share.

A bucket holds the (token, expert) pairs that share a capacity C: those of one expert, or of one
device, in one capacity group. The C pairs with the smallest keys stay. A method says by its keys
which pairs come first: token order, random numbers, or scores from the highest down
(:func:`score_key`).

Nothing loops over tokens, experts or buckets. All shapes depend on the shapes of the arguments
alone, and nothing waits for a device, so that a decision compiles into one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capmoe_eval.routing.scores import HIGHEST, score_bits

# Shape suffixes: T counted tokens, S slots per token, B buckets, P = T·S pairs.

KEY_BITS = 33
"""Keys are below 2**33: 31 bits of a score, an index or a random number, and two above them."""
ADDED = 1 << 31
"""The bit of a key for added candidates, where the router's own choice comes first."""
DROPPED_FIRST = 1 << 32
"""The bit of a key for tokens of the modality that is dropped first."""


def score_key(score_TS: Tensor) -> Tensor:
    """Return keys in [0, 2^31) that order non-negative float32 scores from the highest down."""
    return HIGHEST - score_bits(score_TS)


def keep_best(
    bucket_TS: Tensor, key_TS: Tensor, valid_TS: Tensor | None, limit_B: Tensor
) -> Tensor:
    """Return a mask [T, S] of the slots that are kept: in each bucket those with the least keys.

    Equal keys are ordered by token, the lower index first, and those of one token by slot. Where a
    bucket holds several experts of a token, as a device's does, slots must be in expert order.

    Args:
        bucket_TS: The bucket of each slot, from 0 to B - 1, int64.
        key_TS: The key of each slot, from 0 to ``2**KEY_BITS - 1``, int32 or int64.
        valid_TS: False for the slots that are never kept and take no place; None if all are valid.
        limit_B: The most slots that each bucket keeps, int64.
    """
    n_buckets = len(limit_B)
    place_TS = (bucket_TS << KEY_BITS) + key_TS
    if valid_TS is not None:  # one more bucket holds the invalid slots
        place_TS.masked_fill_(~valid_TS, n_buckets << KEY_BITS)
    sorted_P, order_P = place_TS.view(-1).sort(stable=True)
    # The pairs of a bucket stand together: its first C are before the end that is computed here.
    first_B1 = torch.searchsorted(
        sorted_P, torch.arange(n_buckets + 1, device=sorted_P.device) << KEY_BITS
    )
    end_B1 = torch.cat([torch.minimum(first_B1[:-1] + limit_B, first_B1[1:]), first_B1[-1:] * 0])
    end_P = end_B1.gather(0, sorted_P >> KEY_BITS)
    kept_P = torch.arange(len(end_P), device=end_P.device) < end_P
    return torch.empty_like(kept_P).scatter_(0, order_P, kept_P).view_as(bucket_TS)
