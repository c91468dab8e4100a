"""Define groups, capacities and the pairs that each method keeps, for checks of its decisions.

Written from the definitions alone, in NumPy: capacities in whole numbers, tokens by their sequence,
pairs by expert. Nothing here is shared with the decisions. Ties go to the lower token, then to the
lower expert.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from capmoe_eval.routing.method import Method

# Shape suffixes: T counted tokens, E experts, K = top-k, G groups, R ranks, N experts of a rank,
# P pairs, H hidden size.

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RoutedTokens:
    """The counted tokens of a whole batch in one layer, with all that a decision depends on."""

    layer: int  # its number
    forward: int  # forwards of the model before this one
    score_TE: Array  # gate scores
    ranking_TE: Array  # the scores that the router ranks experts by
    eligible_TE: Array  # False where the family's group masking rules the expert out
    topk_TK: Array  # the router's own choice
    weight_TK: Array  # its combine weights, in float64
    group_T: Array  # capacity group of each token
    rank_T: Array  # emulated rank of each token
    rank_E: Array  # the rank that holds each expert
    unit_E: Array  # the unit of each expert that has a capacity: itself, or its rank
    limit_G: Array | None = None  # capacity of a unit in each group; None for a method without
    image_T: Array | None = None  # True for a token of an image
    hidden_TH: Array | None = None  # what the router is called with, for methods that read that
    calibrated: Array | None = None  # what a calibration measured of the layer
    details: Any = None  # what the decision says of itself: Assignment.details

    @property
    def n_experts(self) -> int:
        """Number of routed experts E."""
        return int(self.score_TE.shape[1])

    @property
    def top_k(self) -> int:
        """Experts K per token."""
        return int(self.topk_TK.shape[1])

    @property
    def tokens_G(self) -> Array:
        """Number of tokens of each group [G]."""
        return np.bincount(self.group_T)

    @property
    def chosen_TE(self) -> Array:
        """True for the pairs of the router's own choice."""
        chosen_TE = np.zeros(self.score_TE.shape, dtype=bool)
        np.put_along_axis(chosen_TE, self.topk_TK, True, axis=1)
        return chosen_TE

    @property
    def router_weight_TE(self) -> Array:
        """The router's own combine weights of its choice, 0 for other pairs."""
        weight_TE = np.zeros(self.score_TE.shape)
        np.put_along_axis(weight_TE, self.topk_TK, self.weight_TK, axis=1)
        return weight_TE

    @property
    def unit_TE(self) -> Array:
        """The scores as whole multiples of 2⁻⁴⁰, whose sum does not depend on the order."""
        return np.floor(self.score_TE.astype(np.float64) * 2.0**40).astype(np.int64)

    def best_of(self, pair_TE: Array, most: int) -> Array:
        """Return each token's ``most`` best of the pairs [T, E].

        The top-k come before other experts, eligible experts before ineligible ones, and then the
        ranking decides.
        """
        order_TE = np.argsort(-self.ranking_TE, axis=1, kind="stable")
        tier_TE = 2 * ~self.chosen_TE + ~self.eligible_TE + 4 * ~pair_TE
        by_tier_TE = np.argsort(
            np.take_along_axis(tier_TE, order_TE, axis=1), axis=1, kind="stable"
        )
        best_TE = np.zeros_like(pair_TE)
        best = np.take_along_axis(order_TE, by_tier_TE[:, :most], axis=1)
        np.put_along_axis(best_TE, best, True, axis=1)
        return best_TE & pair_TE


# Groups, ranks and capacities.


def capacity_groups(
    sequence_T: Array,
    n_sequences: int,
    *,
    ep_size: int,
    scope: str,
    process: int = 0,
    processes: int = 1,
) -> tuple[Array, Array]:
    """Return the capacity group and the emulated rank of each token [T].

    Sequence b of B is on rank floor(b·R/B). Where several processes share a batch, each has the
    sequences of one rank; of a scope of one sequence the groups are those of this process.
    """
    if processes > 1:
        rank_T = np.full_like(sequence_T, process * ep_size // processes)
    else:
        rank_T = sequence_T * ep_size // n_sequences
    return (rank_T if scope == "batch" else sequence_T), rank_T


def expert_ranks(n_experts: int, ep_size: int, placed_RN: Array | None = None) -> Array:
    """Return the rank that holds each expert [E]: contiguous placement, or a calibrated one."""
    if placed_RN is None:
        return np.arange(n_experts) // (n_experts // ep_size)
    rank_E = np.empty(n_experts, dtype=np.int64)
    for rank, experts in enumerate(placed_RN):
        rank_E[experts] = rank
    return rank_E


def pairs_per_unit(
    gamma: float, tokens: int, top_k: int, n_experts: int, *, rounding: str, sharing: int = 1
) -> int:
    """Return γ·T·K/E times the ``sharing`` experts of a unit, in whole numbers.

    γ is finite, and the decimal that was written (paper §4; of a device, §5.2).
    """
    numerator, denominator = Decimal(repr(gamma)).as_integer_ratio()
    pairs, rest = divmod(sharing * numerator * tokens * top_k, denominator * n_experts)
    return pairs + (rest > 0 and rounding == "ceil")


def limits(method: Method, gamma: float, tokens_G: Array, *, top_k: int, n_experts: int) -> Array:
    """Return the capacity in each group [G] of a method's unit, an expert or a device.

    It is at most the group's tokens for each expert of the unit.
    """
    by_device = method.granularity == "device"
    sharing = n_experts // method.ep_size if by_device else 1
    if gamma == math.inf:
        return sharing * tokens_G
    rule: dict[str, Any] = {"rounding": method.rounding, "sharing": sharing}
    pairs = [pairs_per_unit(gamma, n, top_k, n_experts, **rule) for n in tokens_G.tolist()]
    limit_G: Array = np.minimum(np.array(pairs, dtype=np.int64), sharing * tokens_G)
    return limit_G


# The order in which pairs are kept, and which are.


def by_chance(tokens: RoutedTokens, seed: int) -> Array:
    """Return random numbers of all pairs [T, E]: a generator for each seed, layer and forward."""
    import torch

    name = f"{seed}/{tokens.layer}/{tokens.forward}"
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    shape = tokens.score_TE.shape
    number_TE = torch.randint(2**31 - 1, shape, generator=generator, device="cpu")
    return np.asarray(number_TE)


def priority(
    tokens: RoutedTokens, number_TE: Array, *, modality: str = "uniform", protect_topk: bool = False
) -> tuple[Array, ...]:
    """Return the sort keys of all pairs [T, E]; compared in this order; the smallest is kept.

    A modality that is dropped first comes behind the other (§5.3), then an added pair behind the
    tokens' own where these are protected, then ``number_TE`` decides.
    """
    is_last_TE = np.zeros(number_TE.shape, dtype=bool)
    if tokens.image_T is not None and modality != "uniform":
        is_last_TE |= (tokens.image_T == (modality == "image_first"))[:, None]
    is_added_TE = ~tokens.chosen_TE & protect_topk
    return is_last_TE, is_added_TE, number_TE


def best_in_buckets(tokens: RoutedTokens, pair_TE: Array, keys: Sequence[Array]) -> Array:
    """Return the C best of the pairs of every (group, expert) or (group, device) [T, E]."""
    assert tokens.limit_G is not None
    group_T1 = tokens.group_T[:, None]
    bucket_TE = group_T1 * tokens.n_experts + tokens.unit_E
    return _first(pair_TE, keys, bucket_TE, tokens.limit_G[group_T1].repeat(tokens.n_experts, 1))


def at_most_k(tokens: RoutedTokens, pair_TE: Array, keys: Sequence[Array]) -> Array:
    """Return each token's K best of the pairs [T, E] (Table 11, "w/ max")."""
    token_TE = np.indices(pair_TE.shape)[0]
    return _first(pair_TE, keys, token_TE, np.full(pair_TE.shape, tokens.top_k))


def _first(pair_TE: Array, keys: Sequence[Array], bucket_TE: Array, limit_TE: Array) -> Array:
    """Return the first pairs [T, E] of each bucket by the keys [T, E], up to its limit."""
    token_P, expert_P = np.nonzero(pair_TE)  # by token, then by expert, which breaks ties
    bucket_P, limit_P = bucket_TE[pair_TE], limit_TE[pair_TE]
    key_P = [key_TE[pair_TE] for key_TE in keys]
    order_P = np.lexsort((*reversed(key_P), bucket_P))
    sorted_P = bucket_P[order_P]
    place_P = np.arange(len(sorted_P)) - np.searchsorted(sorted_P, sorted_P)
    is_kept_P = order_P[place_P < limit_P[order_P]]
    kept_TE = np.zeros_like(pair_TE)
    kept_TE[token_P[is_kept_P], expert_P[is_kept_P]] = True
    return kept_TE


def buckets_beyond(tokens: RoutedTokens, called_TE: Array) -> int:
    """Return the number of experts (or devices) that a group sends more pairs than C."""
    if tokens.limit_G is None:
        return 0
    load_GU = np.zeros((len(tokens.limit_G), tokens.n_experts), dtype=np.int64)
    token_P, expert_P = np.nonzero(called_TE)
    np.add.at(load_GU, (tokens.group_T[token_P], tokens.unit_E[expert_P]), 1)
    return int((load_GU > tokens.limit_G[:, None]).sum())
