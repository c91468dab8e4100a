"""Keep the best pairs of every bucket: the routine that all bounded methods share.

A bucket holds the (token, expert) pairs that share a capacity C: those of one expert, or of one
device, in one capacity group. The C pairs with the smallest keys stay. A method says by its keys
which pairs come first: token order, random numbers, or scores from the highest down
(:func:`score_key`).

Nothing loops over tokens, experts or buckets. Compiled, or on another device than a CPU,
:func:`keep_best` sorts all pairs by bucket and key: its shapes depend on those of its arguments
alone, and it waits for no device. On a CPU, outside of a graph, NumPy decides the same: a histogram
decides most pairs, and only those at a bucket's edge are sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Shape suffixes: T counted tokens, S slots per token, B buckets, P = T·S pairs, D digits.

HIGHEST = 0x7FFFFFFF
"""The highest bit pattern of a non-negative float32."""
KEY_BITS = 34
"""Keys are below 2**34: 32 bits of a score, an index or a random number, and two above them."""
ADDED = 1 << 32
"""The bit of a key for added candidates, where the router's own choice comes first."""
DROPPED_FIRST = 1 << 33
"""The bit of a key for tokens of the modality that is dropped first."""

FEW = 2048  # pairs that are sorted as they are
PAIRS_PER_CELL = 4  # so that counting cells takes less time than counting pairs

_KEPT, _AT_EDGE = 1, 2  # what becomes of the pairs of a cell; 0: they are dropped

_Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def score_key(score_TS: Tensor) -> Tensor:
    """Return keys in [0, 2^32) that order float32 scores of any sign from the highest down."""
    bits_TS = score_TS.float().contiguous().view(torch.int32)
    magnitude_TS = (bits_TS & HIGHEST).long()  # without the sign bit, so that -0.0 equals 0.0
    return HIGHEST - torch.where(bits_TS < 0, -magnitude_TS, magnitude_TS)


def gate_key(score_TS: Tensor) -> Tensor:
    """Return the keys of :func:`score_key` for gate scores, which are not negative, as int32."""
    bits_TS = score_TS.float().contiguous().view(torch.int32)
    return (~bits_TS).bitwise_and_(HIGHEST)


def best_first(bucket_P: Tensor, score_P: Tensor) -> Tensor:
    """Return the order of pairs by bucket, then by falling score [P]; equal ones keep theirs."""
    return ((bucket_P << KEY_BITS) + score_key(score_P)).argsort(stable=True)


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
        limit_B: The most slots that each bucket keeps, int64; also in a shape such as [G, E].
    """
    if torch.compiler.is_compiling() or key_TS.device.type != "cpu":
        return _keep_by_sort(bucket_TS, key_TS, valid_TS, limit_B.reshape(-1))
    bucket_P, key_P = bucket_TS.numpy().reshape(-1), key_TS.numpy().reshape(-1)
    limit = limit_B.numpy().reshape(-1)
    valid_P = None if valid_TS is None else valid_TS.numpy().reshape(-1)
    if len(key_P) >= FEW:
        keep_P = _keep_by_histogram(bucket_P, key_P, valid_P, limit)
    elif valid_P is None:
        keep_P = _first_of_buckets(bucket_P, key_P, KEY_BITS, limit)
    else:
        bucket_P = np.where(valid_P, bucket_P, len(limit))
        keep_P = _first_of_buckets(bucket_P, key_P, KEY_BITS, np.append(limit, 0))
    return torch.from_numpy(keep_P).view(key_TS.shape)


def _keep_by_sort(
    bucket_TS: Tensor, key_TS: Tensor, valid_TS: Tensor | None, limit_B: Tensor
) -> Tensor:
    """Return the mask of :func:`keep_best`: sort the pairs, cut each bucket at its limit."""
    n_buckets = len(limit_B)
    place_TS = (bucket_TS << KEY_BITS) + key_TS
    if valid_TS is not None:  # one more bucket holds the invalid slots
        place_TS.masked_fill_(~valid_TS, n_buckets << KEY_BITS)
    sorted_P, order_P = place_TS.reshape(-1).sort(stable=True)
    # The pairs of a bucket stand together: its first C are before the end that is computed here.
    first_B1 = torch.searchsorted(
        sorted_P, torch.arange(n_buckets + 1, device=sorted_P.device) << KEY_BITS
    )
    end_B1 = torch.cat([torch.minimum(first_B1[:-1] + limit_B, first_B1[1:]), first_B1[-1:] * 0])
    end_P = end_B1.gather(0, sorted_P >> KEY_BITS)
    kept_P = torch.arange(len(end_P), device=end_P.device) < end_P
    return torch.empty_like(kept_P).scatter_(0, order_P, kept_P).view_as(bucket_TS)


# On a CPU, with NumPy: it starts no threads, and its calls take a fraction of torch's time.


def _keep_by_histogram(
    bucket_P: _Array, key_P: _Array, valid_P: _Array | None, limit_B: _Array
) -> _Array:
    """Return the mask [P] of the pairs that are kept.

    A digit, the upper bits of a key, decides all pairs of a bucket but those with the digit that
    crosses the limit. These few are sorted by their lower bits.
    """
    n_buckets, least = len(limit_B), int(key_P.min())
    n_bits = (int(key_P.max()) - least).bit_length()
    most_digits = int(len(key_P) / PAIRS_PER_CELL / n_buckets)
    digit_bits = min(max(most_digits, 1).bit_length() - 1, n_bits)
    n_digits, shift = 1 << digit_bits, n_bits - digit_bits
    digit_P = key_P - least
    digit_P >>= shift
    cell_P = bucket_P * n_digits
    cell_P += digit_P
    del digit_P
    n_cells = n_buckets * n_digits
    if valid_P is not None:
        np.copyto(cell_P, n_cells, where=~valid_P)
    count_BD = np.bincount(cell_P, minlength=n_cells)[:n_cells].reshape(n_buckets, n_digits)
    upto_BD, limit_BD = count_BD.cumsum(axis=1), limit_B[:, None]
    fate_C = np.zeros(n_cells + 1, np.int8)
    fate_BD = fate_C[:n_cells].reshape(n_buckets, n_digits)
    fate_BD[upto_BD <= limit_BD] = _KEPT
    fate_BD[(upto_BD > limit_BD) & (upto_BD - count_BD < limit_BD)] = _AT_EDGE
    fate_P = fate_C.take(cell_P)
    keep_P: _Array = fate_P == _KEPT
    rest_R = np.flatnonzero(fate_P == _AT_EDGE)
    low_R = (key_P.take(rest_R) - least) & ((1 << shift) - 1)
    left_B = limit_B - count_BD.sum(axis=1, where=fate_BD == _KEPT)
    bucket_R = cell_P.take(rest_R) >> digit_bits
    keep_P[rest_R] = _first_of_buckets(bucket_R, low_R, shift, left_B)
    return keep_P


def _first_of_buckets(bucket_P: _Array, key_P: _Array, key_bits: int, limit_B: _Array) -> _Array:
    """Return the mask [P] of the first pairs of every bucket, by keys below ``2**key_bits``."""
    place_P = (bucket_P << key_bits) + key_P
    order_P = _order(place_P, key_bits + len(limit_B).bit_length())
    bucket_P = bucket_P.take(order_P)
    count_B = np.bincount(bucket_P, minlength=len(limit_B))
    end_B = count_B.cumsum() - count_B + limit_B
    keep_P = np.empty(len(order_P), np.bool_)
    keep_P[order_P] = np.arange(len(order_P)) < end_B.take(bucket_P)
    return keep_P


def _order(value_P: _Array, n_bits: int) -> _Array:
    """Return the order [P] of values below ``2**n_bits``; equal ones keep theirs.

    Many are sorted by 16 bits at a time: NumPy has a radix sort for these alone.
    """
    if len(value_P) < FEW:
        return value_P.argsort(kind="stable")
    order_P = np.arange(len(value_P))
    for shift in range(0, n_bits, 16):
        digit_P = (value_P.take(order_P) >> shift).astype(np.uint16)
        order_P = order_P.take(digit_P.argsort(kind="stable"))
    return order_P
